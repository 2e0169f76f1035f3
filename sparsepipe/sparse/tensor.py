"""The sparse tensor: features at the occupied voxels of a batch of grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse.coordinates import MAX_COORDINATE, linear_keys
from sparsepipe.sparse.kernel_map import CoordinateCache
from sparsepipe.sparse.kernel_spec import Triple, as_triple
from sparsepipe.sparse.side_stream import copied_beside


class SparseTensor:
    """Features and integer coordinates of occupied voxels.

    Args:
        feats: floating-point [N, C].
        coords: int32 [N, 4], columns (batch, x, y, z), divided by ``stride``; unique rows in
            any order.
        stride: number of voxels of the finest grid along each axis of a voxel.
        spatial_shape: extent of the grid at this level; None: the largest coordinate plus one.
        batch_size: number of samples; None: the largest batch index plus one, whose computation
            waits for the device and cannot detect a batch-last order of columns.
        cache: data derived from exactly these coordinates, shared between tensors; None: none yet.

    Raises:
        CoordinateError: a shape, dtype or device is wrong. Coordinates that are out of range or
            repeated are detected when a kernel map is first built, or by :meth:`check`.
    """

    __slots__ = ("_cache", "batch_size", "coords", "feats", "spatial_shape", "stride")

    def __init__(
        self,
        feats: Tensor,
        coords: Tensor,
        *,
        stride: int | Sequence[int] = 1,
        spatial_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        cache: CoordinateCache | None = None,
    ) -> None:
        if coords.dim() != 2 or coords.shape[1] != 4 or coords.dtype != torch.int32:
            raise CoordinateError(
                f"coords are {coords.dtype} of shape {tuple(coords.shape)}, not int32 [N, 4]",
                remedy="give an int32 tensor of shape [N, 4] with columns (batch, x, y, z)",
            )
        if feats.dim() != 2 or feats.shape[0] != coords.shape[0] or not feats.is_floating_point():
            raise CoordinateError(
                f"feats are {feats.dtype} {tuple(feats.shape)}, not floating [{len(coords)}, C]",
                remedy="give floating-point features [N, C], one row for each row of coords",
            )
        if feats.device != coords.device:
            raise CoordinateError(
                f"feats are on {feats.device}, but coords are on {coords.device}",
                remedy="move one of them to the device of the other",
            )
        self.feats = feats
        self.coords = coords
        self.stride = as_triple(stride, name="stride")
        self.spatial_shape = (
            None if spatial_shape is None else as_triple(spatial_shape, name="spatial_shape")
        )
        if batch_size is None:
            batch_size = int(coords[:, 0].max()) + 1 if coords.shape[0] else 0
        self.batch_size = batch_size
        self._cache = cache

    @property
    def cache(self) -> CoordinateCache:
        """Data derived from the coordinates; created on first use, not pickled or sent to ranks."""
        if self._cache is None:
            self._cache = CoordinateCache(
                self.coords, batch_size=self.batch_size, spatial_shape=self.spatial_shape
            )
        return self._cache

    @property
    def device(self) -> torch.device:
        """Device of features and coordinates."""
        return self.feats.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the features."""
        return self.feats.dtype

    def __len__(self) -> int:
        return self.coords.shape[0]

    def check(self) -> SparseTensor:
        """Checks now that coordinates are in bounds and unique; returns this tensor."""
        self.cache.check()
        return self

    def replace_feats(self, feats_NC: Tensor) -> SparseTensor:
        """Returns a tensor with the same sites and cache, but with the features ``feats_NC``."""
        cache = self.cache
        if feats_NC.shape[:1] != self.coords.shape[:1]:
            raise CoordinateError(
                f"the features have shape {tuple(feats_NC.shape)}, not [{len(self)}, C]",
                remedy="give one row of features for each row of coords",
            )
        return _rebuild(feats_NC, self.coords, self._context(), cache)

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """Copies or converts as ``torch.Tensor.to`` does; a dtype applies to the features only."""
        is_pinned = self.coords.is_pinned()
        # Lightning asks for this with plain tensors only.
        if is_pinned and not any(isinstance(each, bool) for each in args):
            kwargs.setdefault("non_blocking", True)
        feats = self.feats.to(*args, **kwargs)
        # With non_blocking as a positional argument, the copy of the coordinates blocks.
        non_blocking = bool(kwargs.get("non_blocking", False))
        if non_blocking and is_pinned and feats.is_cuda:
            coords = copied_beside(self.coords, feats.device)  # of which maps are made beside, too
        else:
            coords = self.coords.to(feats.device, non_blocking=non_blocking)
        # The cache belongs to the coordinates, so it stays only if they were not copied.
        cache = self._cache if coords is self.coords else None
        return _rebuild(feats, coords, self._context(), cache)

    def pin_memory(self) -> SparseTensor:
        """Returns a copy in page-locked memory, as data loaders with ``pin_memory`` request it."""
        return _rebuild(self.feats.pin_memory(), self.coords.pin_memory(), self._context(), None)

    def detach(self) -> SparseTensor:
        """Returns a tensor with the same sites, and features detached from the graph."""
        return self.replace_feats(self.feats.detach())

    def dense(self) -> Tensor:
        """Returns the features on the full grid, [B, C, X, Y, Z]; 0 where there is no site."""
        cache = self.cache
        cache.check()
        x, y, z = cache.extent
        keys_N = linear_keys(self.coords, cache.extent)
        grid = self.feats.new_zeros(self.batch_size * x * y * z, self.feats.shape[1])
        grid = grid.index_copy(0, keys_N, self.feats)
        return grid.view(self.batch_size, x, y, z, self.feats.shape[1]).permute(0, 4, 1, 2, 3)

    @classmethod
    def from_dense(cls, dense_BCXYZ: Tensor) -> SparseTensor:
        """Builds a tensor with the sites at which any channel is not 0, in lexicographic order."""
        if dense_BCXYZ.dim() != 5:
            raise CoordinateError(
                f"a dense grid of shape {tuple(dense_BCXYZ.shape)} does not have 5 dimensions",
                remedy="give a tensor of shape [B, C, X, Y, Z]",
            )
        sites_N4 = (dense_BCXYZ.detach() != 0).any(1).nonzero()
        b, x, y, z = sites_N4.unbind(1)
        feats_NC = dense_BCXYZ.permute(0, 2, 3, 4, 1)[b, x, y, z]
        return cls(
            feats_NC,
            sites_N4.int(),
            spatial_shape=dense_BCXYZ.shape[2:],
            batch_size=dense_BCXYZ.shape[0],
        )

    def _context(self) -> _Context:
        return self.stride, self.spatial_shape, self.batch_size

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.feats, self.coords, self._context(), None)

    def __repr__(self) -> str:
        return (
            f"SparseTensor(sites={len(self)}, channels={tuple(self.feats.shape[1:])},"
            f" batch_size={self.batch_size}, stride={self.stride},"
            f" spatial_shape={self.spatial_shape}, dtype={self.dtype}, device={self.device})"
        )


_Context = tuple[Triple, Triple | None, int]


def _rebuild(
    feats: Any, coords: Any, context: _Context, cache: CoordinateCache | None
) -> SparseTensor:
    # Without checks, because tree maps replace the tensors with other objects.
    tensor = SparseTensor.__new__(SparseTensor)
    tensor.feats, tensor.coords = feats, coords
    tensor.stride, tensor.spatial_shape, tensor.batch_size = context
    tensor._cache = cache
    return tensor


def sparse_collate(
    samples: Sequence[tuple[Tensor, Tensor]], *, spatial_shape: Sequence[int] | None
) -> SparseTensor:
    """Joins samples into one batch, in which sample ``i`` has batch index ``i``.

    Args:
        samples: (coords, feats) of each sample: integers [n, 3] and floating-point [n, C]; n may
            be 0 and differ between samples.
        spatial_shape: extent of the grid of all samples; None: unknown.
    """
    if not samples:
        raise CoordinateError("there are no samples to join", remedy="give at least one sample")
    for i, (coords_n3, feats_nC) in enumerate(samples):
        integral = not (coords_n3.is_floating_point() or coords_n3.is_complex())
        if coords_n3.dim() != 2 or coords_n3.shape[1] != 3 or not integral:
            raise CoordinateError(
                f"sample {i} has coords {coords_n3.dtype} {tuple(coords_n3.shape)}, not int [n, 3]",
                remedy="give integers of shape [n, 3], (x, y, z) without a batch column",
            )
        if feats_nC.dim() != 2 or len(feats_nC) != len(coords_n3):
            raise CoordinateError(
                f"sample {i} has feats of shape {tuple(feats_nC.shape)}, not [{len(coords_n3)}, C]",
                remedy="give features of shape [n, C], one row for each site",
            )
    sizes = [coords.shape[0] for coords, _ in samples]
    coords = torch.cat([coords for coords, _ in samples])
    if coords.numel() and not 0 <= int(coords.min()) <= int(coords.max()) <= MAX_COORDINATE:
        raise CoordinateError(
            f"coordinates go from {int(coords.min())} to {int(coords.max())}, not within 0 to "
            f"{MAX_COORDINATE}",
            remedy="shift each sample so that it starts at 0, or use larger voxels",
        )
    batch = torch.cat([coords.new_full((n, 1), i, dtype=torch.int32) for i, n in enumerate(sizes)])
    coords_N4 = torch.cat([batch, coords.int()], dim=1)
    feats_NC = torch.cat([feats for _, feats in samples])
    return SparseTensor(feats_NC, coords_N4, spatial_shape=spatial_shape, batch_size=len(samples))


_FEATS, _COORDS = pytree.GetAttrKey("feats"), pytree.GetAttrKey("coords")
pytree.register_pytree_node(
    SparseTensor,
    lambda x: ([x.feats, x.coords], x._context()),
    lambda children, context: _rebuild(*[*children, context, None]),
    flatten_with_keys_fn=lambda x: ([(_FEATS, x.feats), (_COORDS, x.coords)], x._context()),
)


def add(x: SparseTensor, y: SparseTensor) -> SparseTensor:
    """Returns ``x + y`` for tensors with the same sites in the same order; it has ``x``'s cache.

    Outputs of equal windows on one tensor share their coordinates; other coordinates are compared,
    which waits for the device.
    """
    _check_same_sites("add", x, y, same_channels=True)
    return x.replace_feats(x.feats + y.feats)


def cat(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Returns the channels of ``tensors`` side by side, [N, C1 + C2 + ...].

    They need the same sites in the same order, compared as by :func:`add`; the result has the
    cache of the first.
    """
    first, *others = tensors
    for other in others:
        _check_same_sites("concatenate", first, other, same_channels=False)
    return first.replace_feats(torch.cat([each.feats for each in tensors], dim=1))


def _check_same_sites(what: str, x: SparseTensor, y: SparseTensor, *, same_channels: bool) -> None:
    ours, theirs = ((len(each), *each._context()) for each in (x, y))
    if ours != theirs or (same_channels and x.feats.shape[1] != y.feats.shape[1]):
        needed = "sites and channels" if same_channels else "sites"
        raise CoordinateError(
            f"cannot {what} {x!r} and {y!r}, which do not have the same {needed}",
            remedy="give both paths windows that produce the same sites, such as kernel size 2 "
            "with stride 2, or stride 1" + same_channels * ", and the same number of channels",
        )
    if x.coords is not y.coords and not torch.equal(x.coords, y.coords):
        raise CoordinateError(
            f"cannot {what} tensors with different sites, or with the same in different orders",
            remedy="make both by windows of the same size, stride and dilation on the same sites",
        )


# A pickled SparseTensor calls only this function, so other ranks and torch.load may read it.
torch.serialization.add_safe_globals([_rebuild])
