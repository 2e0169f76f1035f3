"""Sparse layers as PyTorch modules: convolution, pooling, and layers that act on each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepipe.sparse.backends import Backend
from sparsepipe.sparse.backends.auto import AutoBackend
from sparsepipe.sparse.backends.native import NativeBackend, sample_rows
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor

Features = TypeVar("Features", SparseTensor, Tensor)


def _having(method: str, backend: Backend) -> NativeBackend:
    """Returns ``backend`` or, where it lacks a method beyond the protocol, the default one."""
    return cast("NativeBackend", backend) if hasattr(backend, method) else AutoBackend()


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of features over all voxels of the batch.

    A training batch of fewer than two rows of features has no variance; it is normalised by the
    running statistics and does not update them.
    """

    def forward(self, input: Features) -> Features:
        feats = input.feats if isinstance(input, SparseTensor) else input
        if self.training and feats.dim() == 2 and feats.shape[0] < 2 and self.track_running_stats:
            # Copies, because other batches update the statistics before this one's backward.
            mean, var = self.running_mean, self.running_var
            assert mean is not None
            assert var is not None
            result = F.batch_norm(
                feats, mean.clone(), var.clone(), self.weight, self.bias, eps=self.eps
            )
        else:
            result = super().forward(feats)
        return input.replace_feats(result) if isinstance(input, SparseTensor) else result


class _RowWise(nn.Module):
    """Lets a PyTorch layer that acts on each row of features also take a sparse tensor."""

    def forward(self, input: Features) -> Features:
        if isinstance(input, SparseTensor):
            return input.replace_feats(super().forward(input.feats))
        found: Features = super().forward(input)
        return found


class ReLU(_RowWise, nn.ReLU):
    """Applies the rectified linear unit to features."""


class LayerNorm(_RowWise, nn.LayerNorm):
    """Normalises the channels of each voxel on their own."""


class Linear(_RowWise, nn.Linear):
    """Applies the same linear map to the features of every voxel."""


class Dropout(_RowWise, nn.Dropout):
    """Sets individual features to zero at random in training."""


class PerVoxel(nn.Module):
    """Applies ``module``, such as any activation of PyTorch's, to the features [N, C]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Features) -> Features:
        if isinstance(input, SparseTensor):
            return input.replace_feats(self.module(input.feats))
        found: Features = self.module(input)
        return found


class Conv3d(nn.Module):
    """Sparse 3D convolution: submanifold for stride 1, downsampling otherwise.

    ``kernel`` is [K, in_channels, out_channels], where K is the number of offsets, x fastest; it is
    applied as cross-correlation. This is the layout of torchsparse and MinkowskiEngine, whose state
    dictionaries can be loaded (including kernels of one offset without a first axis, and biases of
    shape [1, out_channels]); only torchsparse's kernels of size 2, ordered z fastest, must be
    converted first (``sparsepipe.models.converted``). Weights are initialised as in He et al. 2015,
    equation 10: normal with variance 2 / (K * in_channels); the bias is zero.

    Sizes, stride and dilation are one int or (x, y, z); without a ``backend`` the fastest one that
    suits the device and dtype computes the layer (:class:`.AutoBackend`).
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
        self.backend: Backend = AutoBackend() if backend is None else backend
        self.kernel = nn.Parameter(torch.empty(self.spec.volume, in_channels, out_channels))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises kernel and bias again."""
        nn.init.normal_(self.kernel, std=math.sqrt(2 / (self.spec.volume * self.in_channels)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: SparseTensor) -> SparseTensor:
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
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.spec.size},"
            f" stride={self.spec.stride}, dilation={self.spec.dilation},"
            f" bias={self.bias is not None}, backend={self.backend.name}"
        )


class ConvTranspose3d(Conv3d):
    """Transposed sparse convolution: the adjoint of a :class:`Conv3d` with these arguments.

    Its sites are all that the window reaches from the sites of its input, within a grid of
    ``stride`` times the extent, whose voxels are that much finer; for stride 1 those of its input.
    On a full grid it is ``torch.nn.ConvTranspose3d`` with ``padding = dilation * (size // 2)`` for
    odd sizes, 0 for even ones, and the ``output_padding``, which for large windows is negative
    (cuts off), by which the grid is ``stride`` times its input's. ``kernel`` is as of
    :class:`Conv3d`: a site adds ``feats @ kernel[k]`` to the site at offset ``k``. A backend
    without transposed convolutions leaves them to the default one.
    """

    def reset_parameters(self) -> None:
        """Initialises as in :class:`Conv3d`, for as many offsets as reach a site on a full grid."""
        super().reset_parameters()
        with torch.no_grad():
            self.kernel.mul_(math.sqrt(min(self.spec.volume, math.prod(self.spec.stride))))

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self._to_inputs(x, None)

    def _to_inputs(self, x: SparseTensor, like: SparseTensor | None) -> SparseTensor:
        backend = _having("conv_transpose3d", self.backend)
        return backend.conv_transpose3d(x, self.kernel, self.bias, self.spec, like=like)


class InverseConv3d(ConvTranspose3d):
    """Transposed sparse convolution back to the sites of an earlier level.

    Called as ``layer(x, like)``, where ``like`` is a tensor on the sites from which a convolution
    with the same size, stride and dilation led to those of ``x``. The kernel map that ``like``
    keeps of that window is turned round, so that nothing is searched for.

    Raises:
        CoordinateError: the sites of ``x`` are not the outputs of the window on those of ``like``.
    """

    def forward(self, x: SparseTensor, like: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return self._to_inputs(x, like)


class MaxPool3d(nn.Module):
    """Takes, in each channel, the largest feature among the occupied voxels of each window.

    Sizes are one int or (x, y, z); the stride is by default the kernel size.
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
        self.backend: Backend = AutoBackend() if backend is None else backend

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.backend.max_pool3d(x, self.spec)

    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.spec.size}, stride={self.spec.stride}, backend={self.backend.name}"
        )


class AvgPool3d(MaxPool3d):
    """Takes, in each channel, the mean of the features of the occupied voxels of each window.

    Arguments are those of :class:`MaxPool3d`; a backend without average pooling leaves it to the
    default one.
    """

    def forward(self, x: SparseTensor) -> SparseTensor:
        return _having("avg_pool3d", self.backend).avg_pool3d(x, self.spec)


class GlobalMaxPool(nn.Module):
    """Takes each sample's largest feature in each channel, [B, C]; 0 for a sample without sites.

    The gradient goes to the first row of the sample with this feature. A ``backend`` without the
    method leaves it to the default one.
    """

    def __init__(self, *, backend: Backend | None = None) -> None:
        super().__init__()
        self.backend: Backend = AutoBackend() if backend is None else backend

    def forward(self, x: SparseTensor) -> Tensor:
        return _having("global_max_pool", self.backend).global_max_pool(x)


class GlobalAvgPool(GlobalMaxPool):
    """Takes the mean of each sample's features, [B, C]; 0 for a sample without sites."""

    def forward(self, x: SparseTensor) -> Tensor:
        return _having("global_avg_pool", self.backend).global_avg_pool(x)


class InstanceNorm(nn.Module):
    """Normalises each channel of each sample over the voxels of the sample.

    A sample of one voxel gets the bias. There are no running statistics. In 16 bits, mean and
    variance are computed in float32.

    Args:
        num_features: number of channels.
        eps: what is added to the variance.
        affine: whether a learnt weight and bias of each channel follow.
        backend: what computes means, as of :class:`GlobalMaxPool`.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.pool = GlobalAvgPool(backend=backend)
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def forward(self, x: SparseTensor) -> SparseTensor:
        wide = x.replace_feats(x.feats.to(torch.promote_types(x.dtype, torch.float32)))
        mean_BC = self.pool(wide)
        feats_NC = wide.feats - sample_rows(mean_BC, x.cache)
        variance_BC = self.pool(wide.replace_feats(feats_NC.square()))
        feats_NC = feats_NC * sample_rows((variance_BC + self.eps).rsqrt(), x.cache)
        if self.weight is not None and self.bias is not None:
            feats_NC = feats_NC * self.weight + self.bias
        return x.replace_feats(feats_NC.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"


class SqueezeExcite(nn.Module):
    """Scales each channel of a sample by a factor in (0, 1) that a small network computes from the
    means of all its channels (Hu et al. 2018).

    Args:
        channels: number of channels.
        reduction: factor by which the small network's hidden layer is narrower, at least 1 channel.
        backend: what computes means, as of :class:`GlobalMaxPool`.
    """

    def __init__(
        self, channels: int, *, reduction: int = 16, backend: Backend | None = None
    ) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.pool = GlobalAvgPool(backend=backend)
        self.fc = nn.Sequential(
            nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels), nn.Sigmoid()
        )

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.replace_feats(x.feats * sample_rows(self.fc(self.pool(x)), x.cache))
