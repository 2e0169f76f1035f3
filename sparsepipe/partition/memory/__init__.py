"""Memory of stages: the model of its use, and microbatches in flight."""
