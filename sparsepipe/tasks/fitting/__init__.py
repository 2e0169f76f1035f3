"""Whether a training step fits into a budget of memory, and the largest batch that does."""
