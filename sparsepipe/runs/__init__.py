"""Runs: their directories, locks, signals, checkpoints, logs and memory, and the ledger of runs."""
