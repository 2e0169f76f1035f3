"""Coordinates as integers: checks, linear keys and the search for neighbours.

A site (b, x, y, z) of a grid of extent (X, Y, Z) has the key
``((b * X + x) * Y + y) * Z + z``: mixed radix rather than fixed bit fields, so that
an int64 suffices for every grid of up to 21 bits per axis with B * X * Y * Z below 2^63
(one sample of a full 21-bit cube, 73,000 samples of a 50,000^3 grid).

Shape suffixes: N sites, M queried sites, K offsets of a kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse.kernel_spec import Triple

COORDINATE_BITS = 21
MAX_COORDINATE = 2**COORDINATE_BITS - 1
_MAX_KEYS = 2**63

# A table costs memory and initialisation per cell, a binary search a sort and log N steps per
# site: tables are faster where cells are few in total and few per site.
_TABLE_MAX_CELLS = 2**26
_TABLE_MIN_CELLS = 2**16
_TABLE_CELLS_PER_SITE = 512


def check_bounds(coords_N4: Tensor, *, batch_size: int, spatial_shape: Triple | None) -> Triple:
    """Checks the range of coordinates and returns the extent of their grid.

    Costs one reduction and one read-back to the host. The extent is ``spatial_shape`` if given,
    otherwise the largest coordinate plus one on each axis.

    Raises:
        CoordinateError: a coordinate is out of range, or the grid is too large for keys.
    """
    if coords_N4.shape[0] == 0:
        extent = spatial_shape or (1, 1, 1)
    else:
        lowest, highest = torch.stack(coords_N4.aminmax(dim=0)).tolist()
        if lowest[0] < 0 or highest[0] >= batch_size:
            wrong = lowest[0] if lowest[0] < 0 else highest[0]
            raise CoordinateError(
                f"batch index {wrong} is outside a batch of size {batch_size}",
                remedy="order the columns as (batch, x, y, z), batch first: a batch-last tensor"
                " becomes coords[:, [3, 0, 1, 2]]; or pass batch indices from 0 to batch_size - 1",
            )
        for axis, low, high in zip("xyz", lowest[1:], highest[1:], strict=True):
            if low < 0 or high > MAX_COORDINATE:
                raise CoordinateError(
                    f"{axis} coordinates go from {low} to {high}, not within 0 to {MAX_COORDINATE}",
                    remedy="shift each sample to start at 0, use larger voxels, or crop samples",
                )
        extent = spatial_shape or (highest[1] + 1, highest[2] + 1, highest[3] + 1)
        for axis, high, size in zip("xyz", highest[1:], extent, strict=True):
            if high >= size:
                raise CoordinateError(
                    f"{axis} coordinate {high} is outside the spatial_shape {extent}",
                    remedy="give the grid's true spatial_shape, and coordinates as"
                    " (batch, x, y, z): a batch-last tensor becomes coords[:, [3, 0, 1, 2]]",
                )
    if max(extent) > MAX_COORDINATE + 1 or batch_size * math.prod(extent) > _MAX_KEYS:
        raise CoordinateError(
            f"a grid of {extent} for batch_size={batch_size} has an axis above 2^21 voxels or "
            "needs keys of more than 63 bits",
            remedy="use larger voxels, a tighter spatial_shape or fewer samples per batch",
        )
    return extent


def linear_keys(coords_N4: Tensor, extent: Triple) -> Tensor:
    """Returns the int64 keys [N] of sites in a grid of ``extent``, ordered as (batch, x, y, z)."""
    b, x, y, z = coords_N4.long().unbind(1)
    return ((b * extent[0] + x) * extent[1] + y) * extent[2] + z


def coords_of_keys(keys_N: Tensor, extent: Triple) -> Tensor:
    """Returns the sites (int32 [N, 4]) whose :func:`linear_keys` are ``keys_N``."""
    columns = []
    for size in reversed(extent):
        above = torch.div(keys_N, size, rounding_mode="floor")
        columns.append(keys_N - above * size)
        keys_N = above
    return torch.stack([keys_N, *reversed(columns)], dim=1).int()


class TableIndex:
    """A dense table that holds, for each cell of the grid, the row of its site, or -1.

    Each axis is padded by the windows' reach on one side only: an offset below zero lands in the
    empty padding of the neighbouring line, so no lookup needs a bounds check.
    """

    __slots__ = ("_base", "_sizes", "_strides_3", "_table")

    def __init__(
        self, coords_N4: Tensor, *, batch_size: int, extent: Triple, reach: Triple
    ) -> None:
        size_x, size_y, size_z = (e + r for e, r in zip(extent, reach, strict=True))
        self._sizes, self._strides_3 = (size_x, size_y, size_z), (size_y * size_z, size_z, 1)
        self._base = sum(r * s for r, s in zip(reach, self._strides_3, strict=True))
        cells = batch_size * size_x * size_y * size_z + 2 * self._base
        rows_N = torch.arange(coords_N4.shape[0], dtype=torch.int32, device=coords_N4.device)
        self._table = torch.full((cells,), -1, dtype=torch.int32, device=coords_N4.device)
        keys_N = linear_keys(coords_N4, self._sizes) + self._base
        self._table[keys_N] = rows_N
        if not torch.equal(self._table[keys_N], rows_N):
            raise_duplicate(coords_N4, keys_N)

    def find(self, base_M4: Tensor, offsets_K3: Tensor) -> Tensor:
        """Returns the rows (int32 [K, M]) of the sites ``base + offset``; -1 where none exists."""
        strides_3 = torch.tensor(self._strides_3, device=base_M4.device)
        steps_K = (offsets_K3.long() * strides_3).sum(1) + self._base
        keys_KM = steps_K[:, None] + linear_keys(base_M4, self._sizes)[None, :]
        return self._table.index_select(0, keys_KM.reshape(-1)).view(keys_KM.shape)


class SortedIndex:
    """Sorted keys of sites, found by binary search; for grids too large for a table."""

    __slots__ = ("_extent", "_keys_N", "_order_N")

    def __init__(self, coords_N4: Tensor, *, extent: Triple) -> None:
        keys_N = linear_keys(coords_N4, extent)
        self._extent = extent
        self._keys_N, order_N = torch.sort(keys_N)
        self._order_N = order_N.int()
        if bool((self._keys_N[1:] == self._keys_N[:-1]).any()):
            raise_duplicate(coords_N4, keys_N)

    def find(self, base_M4: Tensor, offsets_K3: Tensor) -> Tensor:
        """Returns the rows (int32 [K, M]) of the sites ``base + offset``; -1 where none exists."""
        if self._keys_N.shape[0] == 0 or offsets_K3.shape[0] == 0:
            shape = (offsets_K3.shape[0], base_M4.shape[0])
            return torch.full(shape, -1, dtype=torch.int32, device=base_M4.device)
        extent_3 = torch.tensor(self._extent, dtype=torch.int32, device=base_M4.device)
        rows = []
        for offset_3 in offsets_K3:
            sites_M4 = base_M4.clone()
            sites_M4[:, 1:] += offset_3
            inside_M = ((sites_M4[:, 1:] >= 0) & (sites_M4[:, 1:] < extent_3)).all(1)
            keys_M = linear_keys(sites_M4, self._extent)
            place_M = torch.searchsorted(self._keys_N, keys_M).clamp_(max=len(self._keys_N) - 1)
            hit_M = inside_M & (self._keys_N.index_select(0, place_M) == keys_M)
            rows.append(self._order_N.index_select(0, place_M).masked_fill_(~hit_M, -1))
        return torch.stack(rows)


SiteIndex = TableIndex | SortedIndex


def build_index(
    coords_N4: Tensor, *, batch_size: int, extent: Triple, reach: Triple, method: str = "auto"
) -> SiteIndex:
    """Indexes sites for windows that reach up to ``reach`` voxels beyond them.

    Args:
        coords_N4: int32 sites, within ``extent``.
        batch_size: number of samples in the batch.
        extent: the grid's size per axis.
        reach: largest distance per axis of the offsets that ``find`` will be called with.
        method: "table" (dense lookup table), "sort" (sorted keys and binary search) or "auto".

    Raises:
        CoordinateError: two sites have the same coordinates.
    """
    if method == "auto":
        cells = batch_size * math.prod(e + r for e, r in zip(extent, reach, strict=True))
        method = "table" if suits_table(cells, coords_N4.shape[0]) else "sort"
    if method == "table":
        return TableIndex(coords_N4, batch_size=batch_size, extent=extent, reach=reach)
    return SortedIndex(coords_N4, extent=extent)


def suits_table(cells: int, sites: int) -> bool:
    """Returns whether a table of a grid's cells is faster than a binary search of its sites."""
    return cells <= min(_TABLE_MAX_CELLS, max(_TABLE_MIN_CELLS, _TABLE_CELLS_PER_SITE * sites))


def raise_duplicate(coords_N4: Tensor, keys_N: Tensor) -> None:
    """Raises a ``CoordinateError`` for the first row that repeats an earlier row's coordinates."""
    sorted_N, order_N = torch.sort(keys_N, stable=True)
    repeats = (sorted_N[1:] == sorted_N[:-1]).nonzero().flatten()
    later = order_N[repeats + 1]
    which = int(torch.argmin(later))
    first, second = int(order_N[repeats[which]]), int(later[which])
    raise CoordinateError(
        f"rows {first} and {second} have the same coordinates (batch, x, y, z)"
        f" {tuple(coords_N4[second].tolist())}",
        remedy="merge points of one voxel before building the tensor, for example with"
        " torch.unique(coords, dim=0, return_inverse=True) and a mean of the features",
    )
