"""Overlap: which communication may run beside which compute, one policy a file (``registry`` lists them)."""
