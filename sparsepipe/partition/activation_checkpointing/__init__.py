"""Which layers to run a second time in the backward, in place of keeping their activations."""
