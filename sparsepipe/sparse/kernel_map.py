"""Which input row each output row reads at each kernel offset, kept with the coordinates.

Shape suffixes: N input sites, M output sites, K offsets of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse.coordinates import (
    SiteIndex,
    build_index,
    check_bounds,
    coords_of_keys,
    linear_keys,
)
from sparsepipe.sparse.gather_plan import GatherPlan, build_gather_plan
from sparsepipe.sparse.kernel_spec import KernelSpec, Triple

T = TypeVar("T")


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


class KernelMap:
    """The neighbours of every output site, and the output level they define.

    Attributes:
        spec: the window.
        neighbours_KM: int32, the input row at each offset, -1 where there is none.
        num_inputs: N, rows of the input level.
        output: cache of the output level; None for the input's own (a submanifold window), which
            has this map and is not held here, so that no cycle keeps both beyond their use.
        parent_N: for a tiling window the output row of each input, else None.
        offset_N: for a tiling window the offset at which it is read, else None.
    """

    __slots__ = (
        "_by_site",
        "_derived",
        "_num_pairs",
        "_plans",
        "_reversed",
        "neighbours_KM",
        "num_inputs",
        "offset_N",
        "output",
        "parent_N",
        "spec",
    )

    def __init__(
        self,
        spec: KernelSpec,
        neighbours_KM: Tensor,
        *,
        num_inputs: int,
        output: CoordinateCache | None,
        parent_N: Tensor | None = None,
        offset_N: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.neighbours_KM = neighbours_KM
        self.num_inputs = num_inputs
        self.output = output
        self.parent_N = parent_N
        self.offset_N = offset_N
        self._plans: dict[tuple[str, int], GatherPlan] = {}
        self._derived: dict[str, Any] = {}
        self._num_pairs: int | None = None
        self._by_site: Tensor | None = None
        self._reversed: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """M, rows of the output level."""
        return self.neighbours_KM.shape[1]

    @property
    def num_pairs(self) -> int:
        """Pairs of an input and an output over all offsets (read back once)."""
        if self._num_pairs is None:
            self._num_pairs = int((self.neighbours_KM >= 0).sum())
        return self._num_pairs

    def gather_plan(self, rows_per_block: int) -> GatherPlan:
        """The plan that makes outputs from inputs, in blocks of output rows."""
        return self._plan("forward", self.neighbours_KM, rows_per_block)

    def scatter_plan(self, rows_per_block: int) -> GatherPlan:
        """The plan that makes inputs from outputs, in blocks of input rows.

        It sums at each input what gathers at the outputs: the adjoint of
        :meth:`gather_plan`. For a symmetric window it is the same plan with the
        offsets in reverse order (:attr:`KernelSpec.is_symmetric`), and that one is
        returned, unreversed.
        """
        if self.spec.is_symmetric:
            return self.gather_plan(rows_per_block)
        return self._plan("backward", self.readers_KN, rows_per_block)

    @property
    def neighbours_MK(self) -> Tensor:
        """The neighbours by output site, N where there is none (to index padded rows)."""
        if self._by_site is None:
            rows_KM = torch.where(self.neighbours_KM < 0, self.num_inputs, self.neighbours_KM)
            self._by_site = rows_KM.t().contiguous()
        return self._by_site

    @property
    def readers_KN(self) -> Tensor:
        """int32, the output row that reads each input at each offset, -1 where none."""
        if self._reversed is None:
            self._reversed = invert_rows(self.neighbours_KM, self.num_inputs)
        return self._reversed

    def derived(self, name: str, build: Callable[[KernelMap], T]) -> T:
        """What ``build`` makes of this map, made at first use and kept under ``name``."""
        if name not in self._derived:
            self._derived[name] = build(self)
        value: T = self._derived[name]
        return value

    def _plan(self, direction: str, rows_KM: Tensor, rows_per_block: int) -> GatherPlan:
        key = direction, rows_per_block
        if key not in self._plans:
            self._plans[key] = build_gather_plan(rows_KM, rows_per_block)
        return self._plans[key]


def invert_rows(rows_KM: Tensor, num_targets: int) -> Tensor:
    """For each k swap the roles of rows: ``out[k, rows[k, m]] = m``, -1 elsewhere."""
    volume, count = rows_KM.shape
    # One column more takes what points nowhere, so no mask has to be read back.
    inverted = torch.full((volume, num_targets + 1), -1, dtype=torch.int32, device=rows_KM.device)
    places_KM = torch.where(rows_KM < 0, num_targets, rows_KM).long()
    own_M = torch.arange(count, dtype=torch.int32, device=rows_KM.device)
    inverted.scatter_(1, places_KM, own_M.expand(volume, count))
    return inverted[:, :num_targets].contiguous()


def build_kernel_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    """Build the map of one window over the sites of ``level`` (checked before).

    Output sites are the input sites for stride 1; ``floor(coords / stride)`` for
    windows that tile the grid; otherwise every site of the grid of
    ``ceil(extent / stride)`` whose window holds an input, as for a dense convolution
    with padding ``dilation * (K // 2)``.

    Raises:
        CoordinateError: see :func:`check_grid_is_known`.
    """
    check_grid_is_known(level, spec)
    if spec.is_submanifold:
        return _submanifold_map(level, spec)
    if spec.is_tiling:
        return _tiling_map(level, spec)
    return _strided_map(level, spec)


def check_grid_is_known(level: CoordinateCache, spec: KernelSpec) -> None:
    """Check that the output sites of a window do not hang on the other samples of a batch.

    A strided window that reads before its site can touch a site beyond the last input.
    Whether the grid has that site only ``spatial_shape`` can tell: the largest
    coordinate, which stands in elsewhere, may be another sample's.

    Raises:
        CoordinateError: such a window over sites whose ``spatial_shape`` was not given.
    """
    if level.spatial_shape is None and not spec.is_submanifold and any(spec.before):
        raise CoordinateError(
            f"a centred window of {spec.size} with stride {spec.stride} needs the grid's extent",
            remedy="pass spatial_shape to SparseTensor or sparse_collate",
        )


def _offsets(spec: KernelSpec, level: CoordinateCache) -> Tensor:
    return torch.tensor(spec.offsets(), dtype=torch.int32, device=level.coords_N4.device)


def _submanifold_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    offsets_K3 = _offsets(spec, level)
    coords_N4 = level.coords_N4
    count = coords_N4.shape[0]
    index = level.site_index(spec.reach)
    if not spec.is_symmetric:
        rows_KN = index.find(coords_N4, offsets_K3)
        return KernelMap(spec, rows_KN, num_inputs=count, output=None)
    # Who is my neighbour at an offset has me as neighbour at the opposite one.
    half = spec.volume // 2
    below_HN = index.find(coords_N4, offsets_K3[:half])
    own_N = torch.arange(count, dtype=torch.int32, device=coords_N4.device)
    above_HN = invert_rows(below_HN, count).flip(0)
    rows_KN = torch.cat([below_HN, own_N[None], above_HN])
    return KernelMap(spec, rows_KN, num_inputs=count, output=None)


def _coarse_shape(extent: Triple, stride: Triple) -> Triple:
    x, y, z = (-(-e // s) for e, s in zip(extent, stride, strict=True))
    return x, y, z


def _tiling_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    coords_N4 = level.coords_N4
    count, device = coords_N4.shape[0], coords_N4.device
    coarse = _coarse_shape(level.extent, spec.stride)
    divisor_4 = torch.tensor((1, *spec.stride), dtype=torch.int32, device=device)
    parents_N4 = torch.div(coords_N4, divisor_4, rounding_mode="floor")
    within_N4 = coords_N4 - parents_N4 * divisor_4
    keys_M, parent_N = torch.unique(linear_keys(parents_N4, coarse), return_inverse=True)
    size_x, size_y, _ = spec.size
    _, x, y, z = within_N4.long().unbind(1)
    offset_N = (z * size_y + y) * size_x + x
    total = keys_M.shape[0]
    rows_KM = torch.full((spec.volume, total), -1, dtype=torch.int32, device=device)
    own_N = torch.arange(count, dtype=torch.int32, device=device)
    rows_KM.view(-1)[offset_N * total + parent_N] = own_N
    output = level.coarser(coords_of_keys(keys_M, coarse), coarse)
    return KernelMap(
        spec, rows_KM, num_inputs=count, output=output, parent_N=parent_N, offset_N=offset_N
    )


def _strided_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    coords_N4 = level.coords_N4
    device = coords_N4.device
    coarse = _coarse_shape(level.extent, spec.stride)
    offsets_K3 = _offsets(spec, level)
    stride_3 = torch.tensor(spec.stride, dtype=torch.int32, device=device)
    coarse_3 = torch.tensor(coarse, dtype=torch.int32, device=device)
    # y * stride + offset = input, hence y = (input - offset) / stride where whole.
    shifted_KN3 = coords_N4[None, :, 1:] - offsets_K3[:, None, :]
    sites_KN3 = torch.div(shifted_KN3, stride_3, rounding_mode="floor")
    touched_KN = (
        (sites_KN3 * stride_3 == shifted_KN3) & (sites_KN3 >= 0) & (sites_KN3 < coarse_3)
    ).all(2)
    batch_KN = coords_N4[:, 0].expand(spec.volume, -1)
    candidates_P4 = torch.cat([batch_KN[..., None], sites_KN3], dim=2)[touched_KN]
    keys_M = torch.unique(linear_keys(candidates_P4, coarse))
    output = level.coarser(coords_of_keys(keys_M, coarse), coarse)
    base_M4 = output.coords_N4.clone()
    base_M4[:, 1:] *= stride_3
    rows_KM = level.site_index(spec.reach).find(base_M4, offsets_K3)
    return KernelMap(spec, rows_KM, num_inputs=coords_N4.shape[0], output=output)


def derived_tensors(caches: Iterable[CoordinateCache]) -> Iterator[Tensor]:
    """Every tensor in caches and their coarser levels, each once, but no coordinates.

    That is indices of sites, kernel maps, gather plans, and what else was derived so far.

    Args:
        caches: they may share levels.
    """
    waiting: list[Any] = list(caches)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        else:  # of this package: all keep their attributes in slots
            names = getattr(value, "__slots__", ())
            waiting += [
                getattr(value, name) for name in names if name not in ("coords_N4", "__weakref__")
            ]
