"""A run's directory: identity, locks, signals, checkpoints, logs, memory; the ledger of runs."""
