"""Training steps within a memory budget: whether one fits, and the largest batch that does."""
