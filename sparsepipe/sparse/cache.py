"""What is derived from the coordinates of one level, computed once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsepipe.sparse.coordinates import SiteIndex, build_index, check_bounds
from sparsepipe.sparse.kernel_map import KernelMap, build_kernel_map
from sparsepipe.sparse.kernel_spec import KernelSpec, Triple

_watchers: list[Callable[[], None]] = []


@contextmanager
def watching_kernel_maps(watch: Callable[[], None]) -> Iterator[None]:
    """Calls ``watch`` right before and right after each building of a kernel map.

    Args:
        watch: takes the time, for instance.
    """
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


class CoordinateCache:
    """Coordinates of one level with its index, its kernel maps and coarser levels.

    Every tensor on the same sites shares one cache. A kernel map is kept per (kernel
    size, stride, dilation) and holds the cache of its output level, so levels form a
    tree: a second downsampling by the same window finds the coordinates, and what was
    derived from them, ready. Nothing is checked before something is first derived.

    Attributes:
        coords_N4: int32 sites (batch, x, y, z).
        batch_size: samples in the batch.
        spatial_shape: extent of the grid, None where it was not given.
        index_method: "auto", "table" or "sort", see :func:`build_index`.
    """

    __slots__ = (
        "__weakref__",
        "_extent",
        "_indices",
        "_maps",
        "_segments",
        "_verified",
        "batch_size",
        "coords_N4",
        "index_method",
        "spatial_shape",
    )

    def __init__(
        self,
        coords_N4: Tensor,
        *,
        batch_size: int,
        spatial_shape: Triple | None = None,
        index_method: str = "auto",
    ) -> None:
        self.coords_N4 = coords_N4
        self.batch_size = batch_size
        self.spatial_shape = spatial_shape
        self.index_method = index_method
        self._extent: Triple | None = None
        self._verified = False
        self._indices: dict[Triple, SiteIndex] = {}
        self._maps: dict[KernelSpec, KernelMap] = {}
        self._segments: tuple[Tensor, Tensor] | None = None

    @property
    def extent(self) -> Triple:
        """Size of the grid: ``spatial_shape`` or the largest coordinate plus one.

        Raises:
            CoordinateError: see :func:`check_bounds`.
        """
        if self._extent is None:
            self._extent = check_bounds(
                self.coords_N4, batch_size=self.batch_size, spatial_shape=self.spatial_shape
            )
        return self._extent

    def bare(self) -> CoordinateCache:
        """The same coordinates, and what is known of them, without what is derived."""
        cache = CoordinateCache(
            self.coords_N4,
            batch_size=self.batch_size,
            spatial_shape=self.spatial_shape,
            index_method=self.index_method,
        )
        cache._extent, cache._verified = self._extent, self._verified
        return cache

    def check(self) -> None:
        """Check bounds and uniqueness of the coordinates, once.

        Raises:
            CoordinateError: see :func:`check_bounds` and :func:`build_index`.
        """
        if not self._verified:
            self.site_index((1, 1, 1))
            self._verified = True

    def site_index(self, reach: Triple) -> SiteIndex:
        """The index for windows of this reach (see :attr:`KernelSpec.reach`)."""
        reach = tuple(max(1, r) for r in reach)  # type: ignore[assignment]
        if reach not in self._indices:
            self._indices[reach] = build_index(
                self.coords_N4,
                batch_size=self.batch_size,
                extent=self.extent,
                reach=reach,
                method=self.index_method,
            )
        return self._indices[reach]

    def kernel_map(self, spec: KernelSpec) -> KernelMap:
        """The map of a window over these sites, built at first use.

        Raises:
            CoordinateError: the coordinates are not valid.
        """
        if spec not in self._maps:
            for watch in _watchers:
                watch()
            self.check()
            self._maps[spec] = build_kernel_map(self, spec)
            for watch in _watchers:
                watch()
        return self._maps[spec]

    def coarser(self, coords_M4: Tensor, extent: Triple) -> CoordinateCache:
        """Cache of a level whose sites are known to be unique and within ``extent``.

        Its ``spatial_shape`` is as well known as this level's.
        """
        level = CoordinateCache(
            coords_M4,
            batch_size=self.batch_size,
            spatial_shape=None if self.spatial_shape is None else extent,
            index_method=self.index_method,
        )
        level._extent = extent
        level._verified = True
        return level

    def samples(self) -> tuple[Tensor, Tensor]:
        """Rows by sample: int64 [B, most] padded with N, and counts int64 [B].

        Rows of a sample keep their order; rows of one sample need not be adjacent.
        """
        if self._segments is None:
            _ = self.extent  # the batch column must be in bounds
            batch_N = self.coords_N4[:, 0].long()
            count = batch_N.shape[0]
            counts_B = torch.bincount(batch_N, minlength=self.batch_size)
            most = int(counts_B.max()) if self.batch_size else 0
            order_N = torch.argsort(batch_N, stable=True)
            sorted_N = batch_N.index_select(0, order_N)
            starts_B = counts_B.cumsum(0) - counts_B
            place_N = torch.arange(count, device=batch_N.device) - starts_B[sorted_N]
            rows_BL = torch.full(
                (self.batch_size, most), count, dtype=torch.int64, device=batch_N.device
            )
            rows_BL.view(-1)[sorted_N * most + place_N] = order_N
            self._segments = rows_BL, counts_B
        return self._segments
