"""Benchmarks: measured speed and accuracy, run by hand or in CI, apart from the tests."""
