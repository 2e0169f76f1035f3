"""Implementations of sparse convolution and pooling behind one protocol."""

from sparsepipe.sparse.backends.native import NativeBackend
from sparsepipe.sparse.backends.protocol import Backend

__all__ = ["Backend", "NativeBackend"]
