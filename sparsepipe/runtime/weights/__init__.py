"""The weights that each minibatch in flight uses; independent of ranks."""

from sparsepipe.runtime.weights.modes import Mode
from sparsepipe.runtime.weights.versions import Weights

__all__ = ["Mode", "Weights"]
