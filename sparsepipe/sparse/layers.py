"""Convolution and pooling as ordinary modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.sparse.backends.native import NativeBackend
from sparsepipe.sparse.backends.protocol import Backend
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor


class Conv3d(nn.Module):
    """Sparse 3D convolution: submanifold for stride 1, downsampling otherwise.

    ``kernel`` is [K^3, in_channels, out_channels], x fastest, applied as
    cross-correlation: the layout of torchsparse and MinkowskiEngine, whose state
    dictionaries load (a K=1 kernel without its first axis and a bias of shape
    [1, out_channels] included; torchsparse counts even sizes z fastest, so its kernels of
    size 2 go through ``backends.torchsparse_convert.from_torchsparse`` first). Weights start
    as in He et al. 2015, equation 10: normal with variance 2 / (K^3 * in_channels); the bias
    starts at zero.

    Args:
        in_channels: C of the input.
        out_channels: C of the output.
        kernel_size: one int or (x, y, z).
        stride: one int or (x, y, z).
        dilation: one int or (x, y, z).
        bias: whether to add a bias.
        backend: who computes it; None is the native backend.

    Raises:
        ConfigError: a size, stride or dilation that is not positive.
    """

    kernel: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int] = 3,
        *,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        bias: bool = False,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.spec = KernelSpec.of(kernel_size, stride=stride, dilation=dilation)
        self.backend: Backend = NativeBackend() if backend is None else backend
        self.kernel = nn.Parameter(torch.empty(self.spec.volume, in_channels, out_channels))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.kernel, std=math.sqrt(2 / (self.spec.volume * self.in_channels)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Convolve ``x``."""
        return self.backend.conv3d(x, self.kernel, self.bias, self.spec)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        kernel = state_dict.get(prefix + "kernel")
        if isinstance(kernel, Tensor) and kernel.dim() == 2 and self.spec.volume == 1:
            state_dict[prefix + "kernel"] = kernel[None]
        bias = state_dict.get(prefix + "bias")
        if isinstance(bias, Tensor) and bias.dim() == 2 and bias.shape[0] == 1:
            state_dict[prefix + "bias"] = bias[0]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.spec.size},"
            f" stride={self.spec.stride}, dilation={self.spec.dilation},"
            f" bias={self.bias is not None}, backend={self.backend.name}"
        )


class MaxPool3d(nn.Module):
    """Largest feature among the existing voxels of each window.

    Args:
        kernel_size: one int or (x, y, z).
        stride: one int or (x, y, z); None takes the kernel size.
        backend: who computes it; None is the native backend.

    Raises:
        ConfigError: a size or stride that is not positive.
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int] = 2,
        *,
        stride: int | Sequence[int] | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.spec = KernelSpec.for_pooling(kernel_size, stride=stride)
        self.backend: Backend = NativeBackend() if backend is None else backend

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Pool ``x``."""
        return self.backend.max_pool3d(x, self.spec)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return (
            f"kernel_size={self.spec.size}, stride={self.spec.stride}, backend={self.backend.name}"
        )
