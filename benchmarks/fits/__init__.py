"""Fits of the figures of hardware profiles that are fitted, one file a kind; ``benchmarks.fit`` runs them."""
