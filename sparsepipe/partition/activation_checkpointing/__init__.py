"""Which layers to run again in the backward instead of keeping their activations."""
