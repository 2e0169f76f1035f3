"""Conversion between our conventions and those of torchsparse and MinkowskiEngine.

Imports neither of them. The table follows the sources of torchsparse 2.0.0 and 2.1.0 and of
MinkowskiEngine 0.4.3 and 0.5.4:

==================  =====================  =====================  ======================
..                  torchsparse 2.0        torchsparse 2.1        MinkowskiEngine
==================  =====================  =====================  ======================
coordinates         (x, y, z, batch),      (batch, x, y, z),      (batch, x, y, z),
                    multiplied by stride   divided by stride      multiplied by stride
odd kernel volume   x fastest, centred     x fastest, centred     x fastest, centred
kernel of 2s        z fastest, 0 and 1     z fastest, 0 and 1     x fastest, 0 and 1
even size from 4    from -(K/2) + 1        from 0 or -(K/2) + 1,  from 0
                                           by kernel map mode
dilation            ignored                ignored                as ours
kernel of 1x1x1     [Cin, Cout]            [Cin, Cout] if the     [Cin, Cout] if the
                                           stride is 1            stride is 1
bias                [Cout]                 [Cout]                 [1, Cout]
==================  =====================  =====================  ======================

All of them compute cross-correlations. Kernels of odd size, and all of MinkowskiEngine's, load
into ``Conv3d.kernel`` as they are (loading adds the first axis of a 2-D kernel and removes
that of a 2-D bias); torchsparse's kernels of size 2 need :func:`from_torchsparse` first. A
strided torchsparse 2.1 layer matches ours if it was created with
``padding=kernel_size // 2`` for odd sizes and 0 for even ones. MinkowskiEngine's strided
layers have the output sites ``floor(coords / stride)`` for every kernel size, so for odd
sizes the sites differ; where both have a site, the values are equal.

Shape suffixes: N sites, K offsets of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepipe.errors import BackendError, CheckpointError
from sparsepipe.sparse.kernel_spec import KernelSpec, Triple, as_triple


@dataclass(frozen=True, slots=True)
class Convention:
    """How a version of torchsparse writes coordinates.

    Attributes:
        batch_first: columns are (batch, x, y, z), otherwise (x, y, z, batch).
        multiplied: coordinates count voxels of the finest grid (multiples of the stride),
            otherwise voxels of the tensor's own level.
    """

    batch_first: bool
    multiplied: bool


V2_0 = Convention(batch_first=False, multiplied=True)
V2_1 = Convention(batch_first=True, multiplied=False)


def coords_to_torchsparse(coords_N4: Tensor, stride: Triple, convention: Convention) -> Tensor:
    """Our coordinates, (batch, x, y, z) divided by ``stride``, in torchsparse's convention."""
    batch_N1, sites_N3 = coords_N4[:, :1], coords_N4[:, 1:]
    if convention.multiplied:
        sites_N3 = sites_N3 * _row(stride, coords_N4)
    columns = (batch_N1, sites_N3) if convention.batch_first else (sites_N3, batch_N1)
    return torch.cat(columns, dim=1).int().contiguous()


def coords_from_torchsparse(coords_N4: Tensor, stride: Triple, convention: Convention) -> Tensor:
    """Torchsparse's coordinates in our convention; inverts :func:`coords_to_torchsparse`."""
    if convention.batch_first:
        batch_N1, sites_N3 = coords_N4[:, :1], coords_N4[:, 1:]
    else:
        batch_N1, sites_N3 = coords_N4[:, 3:], coords_N4[:, :3]
    if convention.multiplied:
        sites_N3 = torch.div(sites_N3, _row(stride, coords_N4), rounding_mode="floor")
    return torch.cat([batch_N1, sites_N3], dim=1).int().contiguous()


def from_torchsparse(kernel: Tensor, kernel_size: int | Sequence[int]) -> Tensor:
    """A kernel saved by torchsparse, in the layout of ``Conv3d.kernel``.

    Args:
        kernel: [K, Cin, Cout], or [Cin, Cout] for a 1x1x1 window.
        kernel_size: one int or (x, y, z).

    Returns:
        [K, Cin, Cout], x fastest.

    Raises:
        CheckpointError: the kernel's shape does not match the size.
        BackendError: the offsets of this size differ between torchsparse's versions and
            modes (even sizes from 4, even mixed with odd).
    """
    size = as_triple(kernel_size, name="kernel size")
    kernel = _with_offset_axis(kernel, size, "torchsparse")
    places = torchsparse_places(size)
    if places is None:
        return kernel
    return kernel.index_select(0, torch.tensor(places, device=kernel.device))


def to_torchsparse(kernel: Tensor, kernel_size: int | Sequence[int]) -> Tensor:
    """Our kernel [K, Cin, Cout] in torchsparse's order of offsets; differentiable.

    Raises:
        CheckpointError, BackendError: as :func:`from_torchsparse`.
    """
    size = as_triple(kernel_size, name="kernel size")
    kernel = _with_offset_axis(kernel, size, "sparsepipe")
    places = torchsparse_places(size)
    if places is None:
        return kernel
    inverse = sorted(range(len(places)), key=places.__getitem__)
    return kernel.index_select(0, torch.tensor(inverse, device=kernel.device))


def torchsparse_places(size: Triple) -> list[int] | None:
    """Torchsparse's index of each of our offsets (z fastest), or None if the order is equal.

    Raises:
        BackendError: the offsets differ between torchsparse's versions.
    """
    if math.prod(size) % 2 == 1:
        return None
    if max(size) > 2:
        raise BackendError(
            f"torchsparse's versions give kernels of size {size} different offsets",
            remedy="use odd sizes, or sizes 1 and 2 only, or backend=native",
        )
    size_x, size_y, size_z = size
    return [
        (x * size_y + y) * size_z + z
        for z in range(size_z)
        for y in range(size_y)
        for x in range(size_x)
    ]


def difference(spec: KernelSpec, convention: Convention) -> str | None:
    """Why this version of torchsparse computes another result, or None if it does not."""
    if any(d > 1 and k > 1 for d, k in zip(spec.dilation, spec.size, strict=True)):
        return "torchsparse ignores the dilation"
    if spec.volume % 2 == 0 and max(spec.size) > 2:
        return "torchsparse's offsets of this kernel size depend on its version"
    if convention == V2_0 and not (spec.is_submanifold or spec.is_tiling):
        return "torchsparse 2.0 has other output sites where windows overlap or leave gaps"
    return None


def padding(spec: KernelSpec) -> Triple:
    """The padding with which a strided layer of torchsparse 2.1 has our offsets."""
    x, y, z = (k // 2 if k % 2 else 0 for k in spec.size)
    return x, y, z


def spatial_range(
    extent: Triple, *, batch_size: int, spec: KernelSpec
) -> tuple[int, int, int, int]:
    """The input range to declare to torchsparse 2.1, so that its output grid equals ours.

    From an input extent D it derives ``(D + 2 padding - K) // stride + 1`` output sites per
    axis and drops sites beyond, also for stride 1: a kernel of 2 loses the last plane of the
    grid, stride 2 the last plane of an odd extent. Therefore the declared extent is the one
    for which this formula gives ``ceil(D / stride)``.
    """
    x, y, z = (
        (-(-d // s) - 1) * s + k - 2 * p
        for d, s, k, p in zip(extent, spec.stride, spec.size, padding(spec), strict=True)
    )
    return batch_size, x, y, z


def most_outputs_per_input(spec: KernelSpec) -> int:
    """The largest number of output sites whose windows contain one input."""
    return math.prod(-(-k // s) for k, s in zip(spec.size, spec.stride, strict=True))


def _row(stride: Triple, coords_N4: Tensor) -> Tensor:
    return torch.tensor([stride], dtype=coords_N4.dtype, device=coords_N4.device)


def _with_offset_axis(kernel: Tensor, size: Triple, source: str) -> Tensor:
    volume = math.prod(size)
    if kernel.dim() == 2 and volume == 1:
        return kernel[None]
    if kernel.dim() != 3 or kernel.shape[0] != volume:
        raise CheckpointError(
            f"a {source} kernel has shape {tuple(kernel.shape)}, but the window size is {size}",
            remedy=f"give a kernel of shape [{volume}, in_channels, out_channels]",
        )
    return kernel
