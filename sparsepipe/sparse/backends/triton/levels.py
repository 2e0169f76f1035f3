"""Kernel maps made on the device, with one read-back for all levels of a minibatch.

The number of a coarser level's sites decides sizes of tensors, so that the host must know it. The
maps that earlier minibatches on such a grid needed are foreseen: the first map that a minibatch
needs makes the sites of all levels, reads their numbers and the result of the checks back at once,
and makes all other maps. On CUDA this goes on beside the training step that still runs.

Shape suffixes: N sites, K offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepipe.sparse.backends.triton.rows import Sites, find_rows, window
from sparsepipe.sparse.backends.triton.tiles import MADE, NEEDED, OUTPUTS, SITES
from sparsepipe.sparse.coordinates import suits_table
from sparsepipe.sparse.kernel_map import (
    CoordinateCache,
    KernelMap,
    are_watched,
    coarse_shape,
    derived_tensors,
)
from sparsepipe.sparse.kernel_spec import KernelSpec, Triple
from sparsepipe.sparse.side_stream import side_stream, was_copied_beside

_BLOCK = 256
_WRONG, _UNSORTED = 1, 2
"""Bits that say what is wrong with coordinates: out of bounds or repeated; not in the order of
samples.
"""
Path = tuple[KernelSpec, ...]
"""The windows with a stride that lead from the sites of a minibatch to those of a level."""
Needs = dict[tuple[Path, KernelSpec], set[str]]
"""The maps that minibatches needed, and what was made from each."""

_foreseen: dict[tuple[torch.device, int, Triple], Needs] = {}
"""The maps that earlier minibatches of a device, number of samples and extent needed."""


@dataclass(slots=True, eq=False)
class Level:
    """A level whose sites are made on the device.

    Attributes:
        sites: the sites; until their number is known, with rows that are undefined at the end.
        number: int32 [1], their number.
        path: windows that lead to the level.
        needs: the maps that minibatches with the same device, samples and extent needed.
        in_order: whether the sites are in the order of samples.
        coarser: levels of the windows with a stride.
    """

    sites: Sites
    number: Tensor
    path: Path
    needs: Needs
    in_order: bool = True
    coarser: dict[KernelSpec, Level] = field(default_factory=dict)


def kernel_map(cache: CoordinateCache, spec: KernelSpec) -> KernelMap:
    """Returns the map of a window over the sites of ``cache``, made on the device if a table of its
    grid is small enough; raises what :meth:`.CoordinateCache.kernel_map` does.
    """
    shape, sites = cache.spatial_shape, len(cache.coords_N4)
    if not sites or shape is None or not suits_table(cache.batch_size * math.prod(shape), sites):
        return cache.kernel_map(spec)
    return cache.kernel_map(spec, build=_build)


def _build(cache: CoordinateCache, spec: KernelSpec) -> KernelMap:
    if cache.on_device is not None:
        return _map(cache, cache.on_device, spec)
    with _beside(cache):
        own = _make_levels(cache, spec)
        if are_watched():
            return _map(cache, own, spec)
        for (path, foreseen), names in [(key, list(each)) for key, each in own.needs.items()]:
            at = cache
            for step in path:
                at = at.kernel_map(step, build=_build).output or at
            found = at.kernel_map(foreseen, build=_build)
            for name in names:
                MADE[name](found)
    return cache.kernel_map(spec, build=_build)


def _map(cache: CoordinateCache, own: Level, spec: KernelSpec) -> KernelMap:
    output, outer = None, own
    if not spec.is_submanifold:
        if spec not in own.coarser:  # not foreseen
            outer = _coarser(own, spec, batch_size=cache.batch_size)
            _trim(outer, int(outer.number))
        outer = own.coarser[spec]
        output = cache.derive(outer.sites.coords_N4, outer.sites.extent)
        output.on_device = outer
    rows = find_rows(outer.sites, own.sites, spec, of="outputs")
    inputs = len(cache.coords_N4)
    made = KernelMap(spec, rows.sources_KM, num_inputs=inputs, output=output)
    made.derived(OUTPUTS, lambda _: rows)
    made.derived(SITES, lambda _: (own.sites, outer.sites))
    made.derived(NEEDED, lambda _: own.needs.setdefault((own.path, spec), set()))
    return made


def _make_levels(cache: CoordinateCache, spec: KernelSpec) -> Level:
    """Makes the sites of all levels that are foreseen, or that ``spec`` needs, and checks those of
    ``cache``; returns its level.
    """
    coords_N4, extent, batch = cache.coords_N4.contiguous(), cache.spatial_shape, cache.batch_size
    assert extent is not None
    # What a profiler watches counts for the layer that needs it, and no other.
    key = coords_N4.device, batch, extent
    needs: Needs = {} if are_watched() else _foreseen.setdefault(key, {})
    needs.setdefault(((), spec), set())
    count = coords_N4.shape[0]
    table = coords_N4.new_full((batch * math.prod(extent),), -1)
    found = coords_N4.new_zeros(2)
    _mark[(triton.cdiv(count, _BLOCK),)](
        coords_N4, table, found, count, batch, *extent, BLOCK=_BLOCK
    )
    own = Level(Sites(coords_N4, extent, table), found[1:], (), needs)
    levels = {own.path: own}
    for path, foreseen in sorted(needs, key=lambda key: len(key[0])):
        if not foreseen.is_submanifold:
            made = _coarser(levels[path], foreseen, batch_size=batch)
            levels[made.path] = made
    coarser = [level for path, level in levels.items() if path]
    bits, *numbers = torch.cat([found[:1], *(level.number for level in coarser)]).tolist()
    if bits & _WRONG:
        cache.check()
    own.in_order = not bits & _UNSORTED
    for level, number in zip(coarser, numbers, strict=True):
        _trim(level, number)
    cache.pass_checks(extent)
    cache.on_device = own
    return own


def _coarser(own: Level, spec: KernelSpec, *, batch_size: int) -> Level:
    """Makes the sites of the outputs of a window with a stride."""
    coords_N4 = own.sites.coords_N4
    extent = coarse_shape(own.sites.extent, spec.stride)
    cells, count = batch_size * math.prod(extent), coords_N4.shape[0]
    # Along an axis an input is in the windows of every s-th offset, or of more of them if dilated.
    windows = math.prod(
        -(-k // (s // math.gcd(s, d)))
        for k, s, d in zip(spec.size, spec.stride, spec.dilation, strict=True)
    )
    taken = coords_N4.new_zeros(cells, dtype=torch.int8)
    _touch[(triton.cdiv(count, _BLOCK), spec.volume)](
        coords_N4, own.number, taken, batch_size, *extent, **window(spec), BLOCK=_BLOCK
    )
    table = taken.cumsum(0, dtype=torch.int32)  # one more than the row of each site
    new = coords_N4.new_empty
    made = Level(
        Sites(new(min(cells, count * windows), 4), extent, table),
        number=new(1),
        path=(*own.path, spec),
        needs=own.needs,
    )
    _list_sites[(triton.cdiv(cells, _BLOCK),)](
        taken, table, made.sites.coords_N4, made.number, cells, *extent, BLOCK=_BLOCK
    )
    own.coarser[spec] = made
    return made


def _trim(level: Level, number: int) -> None:
    level.sites = replace(level.sites, coords_N4=level.sites.coords_N4[:number])


@contextmanager
def _beside(cache: CoordinateCache) -> Iterator[None]:
    """Context whose work on CUDA runs beside that of the current stream, which then waits for it.

    It begins at once if the coordinates were copied to the device in the same way.
    """
    device = cache.coords_N4.device
    if device.type != "cuda":
        yield
        return
    current, side = torch.cuda.current_stream(device), side_stream(device)
    if current == side:
        yield
        return
    if not was_copied_beside(cache.coords_N4):
        side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
    for tensor in derived_tensors([cache], with_coordinates=True):
        tensor.record_stream(current)


@triton.jit(do_not_specialize=["N"])
def _mark(coords_ptr, table_ptr, found_ptr, N, B, X, Y, Z, BLOCK: tl.constexpr):
    """Enters sites into the table, and notes what is wrong with them, and their number."""
    site = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_site = site < N
    batch = tl.load(coords_ptr + 4 * site, mask=is_site, other=0)
    x = tl.load(coords_ptr + 4 * site + 1, mask=is_site, other=0)
    y = tl.load(coords_ptr + 4 * site + 2, mask=is_site, other=0)
    z = tl.load(coords_ptr + 4 * site + 3, mask=is_site, other=0)
    before = tl.load(coords_ptr + 4 * site - 4, mask=is_site & (site > 0), other=0)
    is_in = (batch >= 0) & (x >= 0) & (y >= 0) & (z >= 0)
    is_in = is_site & is_in & (batch < B) & (x < X) & (y < Y) & (z < Z)
    cell = ((batch.to(tl.int64) * X + x) * Y + y) * Z + z
    other = tl.atomic_xchg(table_ptr + cell, site, mask=is_in)
    is_wrong = is_site & ((is_in == 0) | (is_in & (other >= 0)))
    is_unsorted = is_site & (site > 0) & (before > batch)
    bits = tl.max(is_wrong.to(tl.int32), 0) + 2 * tl.max(is_unsorted.to(tl.int32), 0)
    tl.atomic_or(found_ptr, bits)
    tl.store(found_ptr + 1, N, mask=tl.program_id(0) == 0)


@triton.jit
def _touch(
    coords_ptr, number_ptr, taken_ptr, B, X, Y, Z,
    SX: tl.constexpr, SY: tl.constexpr, SZ: tl.constexpr, TX: tl.constexpr, TY: tl.constexpr,
    TZ: tl.constexpr, DX: tl.constexpr, DY: tl.constexpr, DZ: tl.constexpr, BX: tl.constexpr,
    BY: tl.constexpr, BZ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Marks the cells of the sites whose window has a site at one offset."""
    site, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    is_site = site < tl.load(number_ptr)
    batch = tl.load(coords_ptr + 4 * site, mask=is_site, other=0)
    x = tl.load(coords_ptr + 4 * site + 1, mask=is_site, other=0) - (k % SX - BX) * DX
    y = tl.load(coords_ptr + 4 * site + 2, mask=is_site, other=0) - (k // SX % SY - BY) * DY
    z = tl.load(coords_ptr + 4 * site + 3, mask=is_site, other=0) - (k // (SX * SY) - BZ) * DZ
    px, py, pz = x // TX, y // TY, z // TZ
    is_in = (px * TX == x) & (py * TY == y) & (pz * TZ == z) & (px < X) & (py < Y) & (pz < Z)
    is_in = is_site & is_in & (x >= 0) & (y >= 0) & (z >= 0) & (batch >= 0) & (batch < B)
    cell = ((batch.to(tl.int64) * X + px) * Y + py) * Z + pz
    tl.store(taken_ptr + cell, 1, mask=is_in)


@triton.jit
def _list_sites(taken_ptr, table_ptr, coords_ptr, number_ptr, cells, X, Y, Z, BLOCK: tl.constexpr):
    """Lists the marked cells in their order, and turns their ranks into rows."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_cell = cell < cells
    is_taken = tl.load(taken_ptr + cell, mask=is_cell, other=0) > 0
    rank = tl.load(table_ptr + cell, mask=is_cell, other=0)
    tl.store(table_ptr + cell, tl.where(is_taken, rank - 1, -1), mask=is_cell)
    tl.store(number_ptr + cell * 0, rank, mask=cell == cells - 1)
    site = coords_ptr + 4 * (rank - 1)
    tl.store(site, cell // (X * Y * Z), mask=is_taken)
    tl.store(site + 1, cell // (Y * Z) % X, mask=is_taken)
    tl.store(site + 2, cell // Z % Y, mask=is_taken)
    tl.store(site + 3, cell % Z, mask=is_taken)
