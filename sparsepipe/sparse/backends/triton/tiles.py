"""Tiles and pairs of a kernel map: the order in which the kernels of convolutions read it.

Nothing here waits for the device. Shape suffixes: K offsets, M rows, T tiles, S rows of a tile,
P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepipe.sparse.backends.triton.rows import (
    BLOCK,
    Rows,
    Sites,
    bits_of,
    find_rows,
    known_rows,
)
from sparsepipe.sparse.kernel_map import KernelMap, invert_rows
from sparsepipe.sparse.kernel_spec import KernelSpec

OUTPUTS, SITES, NEEDED = "rows of outputs", "sites of inputs and outputs", "what is needed"
"""Names under which a map made on the device has what it knows already, and notes what is made."""

T = TypeVar("T")

TILE_ROWS = (64, 128)
"""Possible rows of a tile: matrix instructions of sm 9.0 take 64; with more, weights are read less
often, but rows share fewer offsets.
"""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows in tiles of similar rows, with the offsets at which any row of a tile has a source.

    Attributes:
        order_M: int64, the rows, those with sources at rare offsets first.
        counts_T: int32, the number of offsets of each tile.
        offsets_TK: int32, these offsets in increasing order; what follows them is undefined.
        sources_TKS: int32, for each of them the source of each row of the tile; -1: none.
    """

    order_M: Tensor
    counts_T: Tensor
    offsets_TK: Tensor
    sources_TKS: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of rows, by offset and then by output row.

    Attributes:
        inputs_P: int32, the input rows; P is K * M, of which the first ``starts[K]`` are defined.
        outputs_P: int32, the output rows.
        starts: int32 [K + 1], the first pair of each offset.
    """

    inputs_P: Tensor
    outputs_P: Tensor
    starts: Tensor


def output_tiles(kernel_map: KernelMap, rows: int) -> Tiles:
    """Returns the output rows in tiles of ``rows``; their sources are input rows."""
    if kernel_map.turned_of:
        return input_tiles(kernel_map.turned_of, rows)
    return _kept(
        kernel_map,
        f"output tiles of {rows} rows",
        lambda own: _tiles(output_rows(own), output_order(own), own.spec, rows),
    )


def input_tiles(kernel_map: KernelMap, rows: int) -> Tiles:
    """Returns the input rows in tiles of ``rows``; their sources are the output rows that read
    them.
    """
    if kernel_map.turned_of:
        return output_tiles(kernel_map.turned_of, rows)
    return _kept(
        kernel_map,
        f"input tiles of {rows} rows",
        lambda own: _tiles(input_rows(own), input_order(own), own.spec, rows),
    )


def output_order(kernel_map: KernelMap) -> Tensor:
    """Returns the output rows in the order of their masks, int64 [M]."""
    return kernel_map.derived("order of outputs", lambda own: _order(output_rows(own)))


def input_order(kernel_map: KernelMap) -> Tensor:
    """Returns the input rows in the order of their masks, int64 [N]."""
    return kernel_map.derived("order of inputs", lambda own: _order(input_rows(own)))


def output_rows(kernel_map: KernelMap) -> Rows:
    """Returns the output rows with their input rows."""
    return kernel_map.derived(OUTPUTS, lambda own: known_rows(own.neighbours_KM, own.spec))


def input_rows(kernel_map: KernelMap) -> Rows:
    """Returns the input rows with the output rows that read them."""
    return _kept(kernel_map, "input rows", _input_rows)


def pairs(kernel_map: KernelMap) -> Pairs:
    """Returns the pairs of the map; by input row where it is another turned round."""
    if kernel_map.turned_of:
        found = pairs(kernel_map.turned_of)
        return Pairs(found.outputs_P, found.inputs_P, found.starts)
    return _kept(kernel_map, "pairs by chunk", _pairs)


MADE: dict[str, Callable[[KernelMap], object]] = {
    **{f"output tiles of {rows} rows": partial(output_tiles, rows=rows) for rows in TILE_ROWS},
    **{f"input tiles of {rows} rows": partial(input_tiles, rows=rows) for rows in TILE_ROWS},
    "input rows": input_rows,
    "pairs by chunk": pairs,
}
"""What can be made from a map, by name."""


def _kept(kernel_map: KernelMap, name: str, make: Callable[[KernelMap], T]) -> T:
    """Returns what ``make`` derives from a map, made once, and notes that it is needed."""
    kernel_map.derived(NEEDED, lambda _: set[str]()).add(name)
    return kernel_map.derived(name, make)


def _input_rows(own: KernelMap) -> Rows:
    sites: tuple[Sites, Sites] | None = own.derived(SITES, lambda _: None)
    if sites is not None:
        return find_rows(*sites, own.spec, of="inputs")
    return known_rows(invert_rows(own.neighbours_KM, own.num_inputs), own.spec)


def _order(rows: Rows) -> Tensor:
    return torch.sort(rows.masks_M, stable=True, descending=True).indices


def _tiles(rows: Rows, order_M: Tensor, spec: KernelSpec, size: int) -> Tiles:
    volume, count = rows.sources_KM.shape
    tiles = triton.cdiv(count, size)
    new = rows.masks_M.new_empty
    found = Tiles(order_M, new(tiles), new(tiles, volume), new(tiles, volume, size))
    _fill_tiles[(tiles,)](
        rows.sources_KM, bits_of(spec, order_M.device), rows.masks_M, order_M,
        found.counts_T, found.offsets_TK, found.sources_TKS,
        count, rows.sources_KM.stride(0), K=volume, S=size,
    )  # fmt: skip
    return found


def _pairs(kernel_map: KernelMap) -> Pairs:
    rows = output_rows(kernel_map)
    (volume, count), blocks = rows.sources_KM.shape, rows.numbers_KJ.shape[1]
    ends = rows.numbers_KJ.view(-1).cumsum(0, dtype=torch.int32)
    new = rows.masks_M.new_empty
    found = Pairs(new(volume * count), new(volume * count), new(volume + 1))
    _fill_pairs[(blocks, volume)](
        rows.sources_KM, ends, found.inputs_P, found.outputs_P, found.starts,
        count, rows.sources_KM.stride(0), blocks, K=volume, BLOCK=BLOCK,
    )  # fmt: skip
    return found


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=["M", "stride"])
def _fill_tiles(
    rows_ptr, bits_ptr, masks_ptr, order_ptr, counts_ptr, offsets_ptr, sources_ptr, M, stride,
    K: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Lists the offsets of a tile, and the sources of its rows at these alone."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, S)
    is_row = tile * S + lane < M
    row = tl.load(order_ptr + tile * S + lane, mask=is_row, other=0)
    bits_of_tile = tl.reduce(tl.load(masks_ptr + row, mask=is_row, other=0), 0, _either)
    count = 0
    for k in range(K):
        has = (bits_of_tile >> tl.load(bits_ptr + k)) & 1
        source = tl.load(
            rows_ptr + tl.cast(stride, tl.int64) * k + row, mask=is_row & (has > 0), other=-1
        )
        tl.store(sources_ptr + (tile * K + count) * S + lane, source, mask=lane * 0 < has)
        tl.store(offsets_ptr + tile * K + count, k, mask=has > 0)
        count += has
    tl.store(counts_ptr + tile, count)


@triton.jit(do_not_specialize=["M", "stride", "blocks"])
def _fill_pairs(
    rows_ptr, ends_ptr, inputs_ptr, outputs_ptr, starts_ptr, M, stride, blocks,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, k = tl.program_id(0), tl.program_id(1)
    row = block * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows_ptr + tl.cast(stride, tl.int64) * k + row, mask=row < M, other=-1)
    has = (source >= 0).to(tl.int32)
    end = tl.load(ends_ptr + k * blocks + block)
    begin = end - tl.sum(has, 0)
    place = begin + tl.cumsum(has, 0) - has
    tl.store(inputs_ptr + place, source, mask=has > 0)
    tl.store(outputs_ptr + place, row, mask=has > 0)
    tl.store(starts_ptr + k, begin, mask=block == 0)
    tl.store(starts_ptr + K, end, mask=(block == blocks - 1) & (k == K - 1))
