"""The interface of sparse backends; layers call nothing else."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor


@runtime_checkable
class Backend(Protocol):
    """Differentiable convolution and max pooling of sparse tensors.

    Backends hold no state of a model: they can be copied, pickled and shared.

    Attributes:
        name: short name for configurations, logs and profiles.
    """

    name: ClassVar[str]

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """Cross-correlates ``x`` with ``kernel`` [K, Cin, Cout], whose first dimension runs over
        the offsets of the window, x fastest, and adds ``bias`` [Cout].

        Output sites are those of :func:`sparsepipe.sparse.kernel_map.build_kernel_map`.
        """
        ...

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """Takes, in each channel, the largest feature among the input sites in each window."""
        ...
