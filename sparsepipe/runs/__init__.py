"""A run's directory: identity, locks, signals, checkpoints, random state and memory."""
