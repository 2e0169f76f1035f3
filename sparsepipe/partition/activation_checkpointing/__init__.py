"""Which layers run again during the backward pass, so that their activations need not be kept."""
