"""A sparse backend: another one's results, computed in float64.

Used by ``backend._target_=sparse_backend.Float64Backend``.
"""

from torch import Tensor

from sparsepipe.sparse import KernelSpec, NativeBackend, SparseTensor


class Float64Backend:
    """Convolution in double precision, for a look at rounding errors."""

    name = "float64"

    def __init__(self) -> None:
        self.native = NativeBackend()

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """Output sites are the native backend's; features come back in those of ``x``."""
        bias = None if bias is None else bias.double()
        y = self.native.conv3d(x.replace_feats(x.feats.double()), kernel.double(), bias, spec)
        return y.replace_feats(y.feats.to(x.feats.dtype))

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """Maxima are exact in any precision."""
        return self.native.max_pool3d(x, spec)
