"""Which weights a minibatch sees while others update them. Knows nothing of ranks."""

from sparsepipe.runtime.weights.modes import Mode
from sparsepipe.runtime.weights.versions import Weights

__all__ = ["Mode", "Weights"]
