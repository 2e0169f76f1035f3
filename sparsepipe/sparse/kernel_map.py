"""Kernel maps: the input row that each output row reads at each offset; cached per level.

Shape suffixes: N input sites, M output sites, K offsets of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
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
    """Calls ``watch`` right before and right after each kernel map that the block builds."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def are_watched() -> bool:
    """Returns whether kernel maps are built in a block of :func:`watching_kernel_maps`."""
    return bool(_watchers)


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class CoordinateCache:
    """Coordinates of one level (sites of one stride), their index, kernel maps and derived levels.

    All tensors on the same sites share one cache. A kernel map is kept for each (kernel size,
    stride, dilation) and direction, and holds the cache of its output level: levels form a tree. A
    second downsampling with the same window reuses the coordinates and everything derived from
    them. Coordinates are checked when something is first derived.

    Attributes:
        coords_N4: int32 sites (batch, x, y, z).
        batch_size: number of samples in the batch.
        spatial_shape: extent of the grid per axis; None: unknown.
        index_method: ``method`` of :func:`build_index`.
        on_device: what a backend keeps of the level, from which it makes maps; None: nothing.
    """

    coords_N4: Tensor
    _: KW_ONLY
    batch_size: int
    spatial_shape: Triple | None = None
    index_method: str = "auto"
    on_device: Any = field(default=None, init=False)
    _extent: Triple | None = field(default=None, init=False)
    _verified: bool = field(default=False, init=False)
    _indices: dict[Triple, SiteIndex] = field(default_factory=dict, init=False)
    _maps: dict[tuple[KernelSpec, bool], KernelMap] = field(default_factory=dict, init=False)
    _segments: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def extent(self) -> Triple:
        """Size of the grid: ``spatial_shape`` or largest coordinates plus one; checks bounds."""
        if self._extent is None:
            self._extent = check_bounds(
                self.coords_N4, batch_size=self.batch_size, spatial_shape=self.spatial_shape
            )
        return self._extent

    def bare(self) -> CoordinateCache:
        """Returns a cache of the same coordinates without derived data; checked if this one is."""
        cache = CoordinateCache(
            self.coords_N4,
            batch_size=self.batch_size,
            spatial_shape=self.spatial_shape,
            index_method=self.index_method,
        )
        cache._extent, cache._verified = self._extent, self._verified
        return cache

    def check(self) -> None:
        """Checks once that coordinates are in bounds and unique, else raises a CoordinateError."""
        if not self._verified:
            self.site_index((1, 1, 1))
            self._verified = True

    def site_index(self, reach: Triple) -> SiteIndex:
        """Returns the index for windows of this ``KernelSpec.reach``, built on first use."""
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

    def kernel_map(
        self, spec: KernelSpec, *, build: BuildMap | None = None, is_transposed: bool = False
    ) -> KernelMap:
        """Returns the kernel map of a window over these sites, built on first use.

        ``build``: what builds it in place of :func:`build_kernel_map`, with checks of its own;
        ``is_transposed``: whether the map is that of :func:`build_transposed_map`.
        """
        key = spec, is_transposed
        if key not in self._maps:
            build = build or (build_transposed_map if is_transposed else build_kernel_map)
            for watch in _watchers:
                watch()
            self._maps[key] = build(self, spec)
            for watch in _watchers:
                watch()
        return self._maps[key]

    def derive(self, coords_M4: Tensor, extent: Triple) -> CoordinateCache:
        """Returns a cache of another level's sites ``coords_M4``, unique and within ``extent``.

        It has a ``spatial_shape`` if this level has one.
        """
        level = CoordinateCache(
            coords_M4,
            batch_size=self.batch_size,
            spatial_shape=None if self.spatial_shape is None else extent,
            index_method=self.index_method,
        )
        level.pass_checks(extent)
        return level

    def pass_checks(self, extent: Triple) -> None:
        """Notes that the coordinates were found to be unique and within ``extent``."""
        self._extent, self._verified = extent, True

    def samples(self) -> tuple[Tensor, Tensor]:
        """Returns each sample's rows, int64 [B, most] padded with N, and their number, int64 [B].

        ``most`` is the largest of these. A sample's row numbers increase, but may have gaps.
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


@dataclass(slots=True, eq=False, repr=False)
class KernelMap:
    """The neighbours of every output site, and the output level they define.

    Attributes:
        spec: the window.
        neighbours_KM: int32, the input row that each output row reads at each offset; -1: none.
        num_inputs: N, number of rows of the input level.
        output: cache of the output level; None if that is the input level (a submanifold
            window), whose cache holds this map: a reference back would form a cycle.
        parent_N: for a tiling window, int64, the output row of each input; else None.
        offset_N: for a tiling window, int64, the offset at which each input is read; else None.
        turned_of: for a map by which inputs read outputs, the map that it turns round; else None.
    """

    spec: KernelSpec
    neighbours_KM: Tensor
    _: KW_ONLY
    num_inputs: int
    output: CoordinateCache | None
    parent_N: Tensor | None = None
    offset_N: Tensor | None = None
    turned_of: KernelMap | None = None
    _derived: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def num_outputs(self) -> int:
        """M, number of rows of the output level."""
        return self.neighbours_KM.shape[1]

    @property
    def num_pairs(self) -> int:
        """Number of (input, output) pairs over all offsets; read back from the device once."""
        return self.derived("kernel map: pairs", lambda own: int((own.neighbours_KM >= 0).sum()))

    def turned(self) -> KernelMap:
        """Returns the map by which inputs read the outputs that read them, without an output level.

        It is a view, made anew each time: what is derived from it is kept here. A symmetric
        window has none, since its map serves both directions, with offsets in reverse order.
        """
        assert not self.spec.is_symmetric
        inputs = self.num_outputs
        return KernelMap(self.spec, self.readers_KN, num_inputs=inputs, output=None, turned_of=self)

    @property
    def readers_KN(self) -> Tensor:
        """int32, the output row that reads each input at each offset; -1: none."""
        return self.derived(READERS, lambda own: invert_rows(own.neighbours_KM, own.num_inputs))

    def gather_plan(self, rows_per_block: int) -> GatherPlan:
        """Returns the plan that computes outputs from inputs, in blocks of output rows."""
        if self.turned_of:
            return self.turned_of.scatter_plan(rows_per_block)
        name = f"kernel map: gather plan of {rows_per_block} rows"
        return self.derived(name, lambda _: build_gather_plan(self.neighbours_KM, rows_per_block))

    def scatter_plan(self, rows_per_block: int) -> GatherPlan:
        """Returns the plan of the adjoint, which computes inputs from outputs, in blocks of input
        rows.

        For a symmetric window this is the gather plan with its offsets in reverse order; the gather
        plan itself is then returned, and the caller must reverse the weights along the offsets.
        """
        if self.spec.is_symmetric:
            return self.gather_plan(rows_per_block)
        if self.turned_of:
            return self.turned_of.gather_plan(rows_per_block)
        name = f"kernel map: scatter plan of {rows_per_block} rows"
        return self.derived(name, lambda own: build_gather_plan(own.readers_KN, rows_per_block))

    @property
    def neighbours_MK(self) -> Tensor:
        """``neighbours_KM`` transposed, with N, the number of a row of padding, in place of -1."""
        rows_KM, rows = self.neighbours_KM, self.num_inputs
        return self.derived(
            "kernel map: rows by site",
            lambda _: torch.where(rows_KM < 0, rows, rows_KM).t().contiguous(),
        )

    def derived(self, name: str, build: Callable[[KernelMap], T]) -> T:
        """Returns ``build(self)``, computed on first use and cached under ``name``."""
        if self.turned_of:
            return self.turned_of.derived(f"turned: {name}", lambda _: build(self))
        if name not in self._derived:
            self._derived[name] = build(self)
        value: T = self._derived[name]
        return value


READERS = "kernel map: readers"
"""Name under which a map keeps its ``readers_KN``."""

BuildMap = Callable[[CoordinateCache, KernelSpec], KernelMap]
"""Builds the map of a window over the sites of a level."""


def invert_rows(rows_KM: Tensor, num_targets: int) -> Tensor:
    """Returns int32 [K, num_targets]: ``out[k, rows_KM[k, m]] = m``, and -1 elsewhere."""
    volume, count = rows_KM.shape
    # An extra column takes the entries of -1, so that no mask has to be read back.
    inverted = torch.full((volume, num_targets + 1), -1, dtype=torch.int32, device=rows_KM.device)
    places_KM = torch.where(rows_KM < 0, num_targets, rows_KM).long()
    own_M = torch.arange(count, dtype=torch.int32, device=rows_KM.device)
    inverted.scatter_(1, places_KM, own_M.expand(volume, count))
    return inverted[:, :num_targets].contiguous()


def build_kernel_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    """Builds the map of one window over the sites of ``level``, which it checks.

    Output sites are the input sites for stride 1; ``floor(coords / stride)`` for windows that
    tile the grid; otherwise every site of the grid of ``ceil(extent / stride)`` whose window
    contains an input, as in a dense convolution with padding ``dilation * (K // 2)``.
    """
    level.check()
    if level.spatial_shape is None and not spec.is_submanifold and any(spec.before):
        # Such a window can have an output site beyond the last input. The largest coordinate does
        # not say whether the grid has that site, since it may belong to another sample.
        raise CoordinateError(
            f"a centred window of size {spec.size} with stride {spec.stride} needs spatial_shape",
            remedy="pass the extent of the grid as spatial_shape to SparseTensor or sparse_collate",
        )
    if spec.is_submanifold:
        return _submanifold_map(level, spec)
    if spec.is_tiling:
        return _tiling_map(level, spec)
    return _strided_map(level, spec)


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
    # A neighbour at one offset has this site as its neighbour at the opposite offset.
    half = spec.volume // 2
    below_HN = index.find(coords_N4, offsets_K3[:half])
    own_N = torch.arange(count, dtype=torch.int32, device=coords_N4.device)
    above_HN = invert_rows(below_HN, count).flip(0)
    rows_KN = torch.cat([below_HN, own_N[None], above_HN])
    return KernelMap(spec, rows_KN, num_inputs=count, output=None)


def coarse_shape(extent: Triple, stride: Triple) -> Triple:
    """Returns the extent of the grid of a window's outputs."""
    x, y, z = (-(-e // s) for e, s in zip(extent, stride, strict=True))
    return x, y, z


def _tiling_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    coords_N4 = level.coords_N4
    count, device = coords_N4.shape[0], coords_N4.device
    coarse = coarse_shape(level.extent, spec.stride)
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
    output = level.derive(coords_of_keys(keys_M, coarse), coarse)
    return KernelMap(
        spec, rows_KM, num_inputs=count, output=output, parent_N=parent_N, offset_N=offset_N
    )


def _strided_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    coords_N4 = level.coords_N4
    device = coords_N4.device
    coarse = coarse_shape(level.extent, spec.stride)
    offsets_K3 = _offsets(spec, level)
    stride_3 = torch.tensor(spec.stride, dtype=torch.int32, device=device)
    coarse_3 = torch.tensor(coarse, dtype=torch.int32, device=device)
    # y * stride + offset = input, hence y = (input - offset) / stride where that is an integer.
    shifted_KN3 = coords_N4[None, :, 1:] - offsets_K3[:, None, :]
    sites_KN3 = torch.div(shifted_KN3, stride_3, rounding_mode="floor")
    touched_KN = (
        (sites_KN3 * stride_3 == shifted_KN3) & (sites_KN3 >= 0) & (sites_KN3 < coarse_3)
    ).all(2)
    batch_KN = coords_N4[:, 0].expand(spec.volume, -1)
    candidates_P4 = torch.cat([batch_KN[..., None], sites_KN3], dim=2)[touched_KN]
    keys_M = torch.unique(linear_keys(candidates_P4, coarse))
    output = level.derive(coords_of_keys(keys_M, coarse), coarse)
    base_M4 = output.coords_N4.clone()
    base_M4[:, 1:] *= stride_3
    rows_KM = level.site_index(spec.reach).find(base_M4, offsets_K3)
    return KernelMap(spec, rows_KM, num_inputs=coords_N4.shape[0], output=output)


def build_transposed_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    """Builds the map of a transposed window with a stride over the sites of ``level``.

    A site ``y`` reaches ``y * stride + offset`` for each offset of the window. Output sites are all
    that any site reaches within the grid of ``extent * stride``, in lexicographic order.
    """
    level.check()
    assert not spec.is_submanifold
    coords_N4, device = level.coords_N4, level.coords_N4.device
    if level.spatial_shape is None and any(
        d * (k - 1 - b) >= s
        for k, d, b, s in zip(spec.size, spec.dilation, spec.before, spec.stride, strict=True)
    ):
        raise CoordinateError(
            f"a transposed window of size {spec.size} with stride {spec.stride} reaches beyond its "
            "sites, and needs spatial_shape",
            remedy="pass the extent of the grid as spatial_shape to SparseTensor or sparse_collate",
        )
    x, y, z = (e * s for e, s in zip(level.extent, spec.stride, strict=True))
    check_bounds(coords_N4, batch_size=level.batch_size, spatial_shape=(x, y, z))
    corners_N3 = coords_N4[:, 1:] * torch.tensor(spec.stride, dtype=torch.int32, device=device)
    sites_KN3 = corners_N3 + _offsets(spec, level)[:, None, :]
    limit_3 = torch.tensor((x, y, z), dtype=torch.int32, device=device)
    inside_KN = ((sites_KN3 >= 0) & (sites_KN3 < limit_3)).all(2)
    sites_KN4 = torch.cat([coords_N4[:, :1].expand(spec.volume, -1, -1), sites_KN3], dim=2)
    places_P, own_P = inside_KN.nonzero().unbind(1)
    keys_M, rows_P = torch.unique(linear_keys(sites_KN4[inside_KN], (x, y, z)), return_inverse=True)
    rows_KM = torch.full((spec.volume, len(keys_M)), -1, dtype=torch.int32, device=device)
    rows_KM[places_P, rows_P] = own_P.int()  # at one offset, one site reaches a place
    output = level.derive(coords_of_keys(keys_M, (x, y, z)), (x, y, z))
    return KernelMap(spec, rows_KM, num_inputs=coords_N4.shape[0], output=output)


def derived_tensors(
    caches: Iterable[CoordinateCache], *, with_coordinates: bool = False
) -> Iterator[Tensor]:
    """Yields each tensor in ``caches`` (of indices, kernel maps and gather plans) once.

    Those of coarser levels are included, the coordinates only if asked for. Caches may share
    levels.
    """
    left_out = {"__weakref__", *(() if with_coordinates else ("coords_N4",))}
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
        else:  # classes of this package keep their attributes in slots
            names = getattr(value, "__slots__", ())
            waiting += [getattr(value, name) for name in names if name not in left_out]
