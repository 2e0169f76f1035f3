"""Rows of kernel maps: one kernel finds the source of each row at each offset, and their masks.

Shape suffixes: K offsets, M rows, J blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepipe.sparse.kernel_spec import KernelSpec, Triple

BLOCK = 256
"""Number of rows in a block."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The sources of rows.

    Attributes:
        sources_KM: int32, the source of each row at each offset; -1: none.
        masks_M: int32, a bit for each offset at which a row has a source (:func:`bits_of`).
        numbers_KJ: int32, the number of sources in each block of rows.
    """

    sources_KM: Tensor
    masks_M: Tensor
    numbers_KJ: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sites:
    """Sites of a level, with a table of their rows.

    Attributes:
        coords_N4: int32, the sites (batch, x, y, z).
        extent: the grid's size on each axis.
        table: int32, for each cell of the batch's grids the row of its site, or -1.
    """

    coords_N4: Tensor
    extent: Triple
    table: Tensor


def find_rows(
    sites: Sites, among: Sites, spec: KernelSpec, *, of: Literal["outputs", "inputs"]
) -> Rows:
    """Finds, for each of ``sites``, its sources ``among`` the sites on the other side of a window.

    ``of``: whether ``sites`` are the window's outputs, which read inputs, or the inputs.
    """
    coords_N4 = sites.coords_N4
    rows = _new_rows(spec.volume, coords_N4.shape[0], coords_N4.device)
    _find[(rows.numbers_KJ.shape[1],)](
        coords_N4, among.table, bits_of(spec, coords_N4.device),
        rows.sources_KM, rows.masks_M, rows.numbers_KJ,
        coords_N4.shape[0], coords_N4.shape[0], rows.numbers_KJ.shape[1], *among.extent,
        **window(spec), K=spec.volume, MODE=of, BLOCK=BLOCK,
    )  # fmt: skip
    return rows


def known_rows(sources_KM: Tensor, spec: KernelSpec) -> Rows:
    """Returns the masks and numbers of rows whose sources are known, int32 [K, M]."""
    volume, count = sources_KM.shape
    rows = _new_rows(volume, count, sources_KM.device)
    _find[(rows.numbers_KJ.shape[1],)](
        sources_KM, sources_KM, bits_of(spec, sources_KM.device),
        sources_KM, rows.masks_M, rows.numbers_KJ,
        count, sources_KM.stride(0), rows.numbers_KJ.shape[1], 1, 1, 1,
        **window(spec), K=volume, MODE="known", BLOCK=BLOCK,
    )  # fmt: skip
    return Rows(sources_KM, rows.masks_M, rows.numbers_KJ)


@cache
def bits_of(spec: KernelSpec, device: torch.device) -> Tensor:
    """Returns the bit of each offset in the masks by which rows are sorted, int32 [K].

    Corners, which the fewest sites of a surface have, get the most significant bits, then edges,
    then faces: rows of a tile then have the most offsets in common.
    """
    offsets = spec.offsets()
    by_rarity = sorted(range(spec.volume), key=lambda k: (sum(map(bool, offsets[k])), k))
    bits = torch.empty(spec.volume, dtype=torch.int32)
    bits[torch.tensor(by_rarity)] = torch.arange(spec.volume, dtype=torch.int32)
    return bits.to(device)


def _new_rows(volume: int, count: int, device: torch.device) -> Rows:
    sizes = ((volume, count), (count,), (volume, max(1, triton.cdiv(count, BLOCK))))
    return Rows(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def window(spec: KernelSpec) -> dict[str, int]:
    """Returns the arguments of kernels that compute the offsets of a window."""
    named = {"S": spec.size, "T": spec.stride, "D": spec.dilation, "B": spec.before}
    return {
        n + axis: v for n, values in named.items() for axis, v in zip("XYZ", values, strict=True)
    }


@triton.jit(do_not_specialize=["M", "stride", "blocks"])
def _find(
    coords_ptr, table_ptr, bits_ptr, sources_ptr, masks_ptr, numbers_ptr, M, stride, blocks,
    X, Y, Z,
    SX: tl.constexpr, SY: tl.constexpr, SZ: tl.constexpr, TX: tl.constexpr, TY: tl.constexpr,
    TZ: tl.constexpr, DX: tl.constexpr, DY: tl.constexpr, DZ: tl.constexpr, BX: tl.constexpr,
    BY: tl.constexpr, BZ: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    is_row = row < M
    if MODE != "known":
        batch = tl.load(coords_ptr + 4 * row, mask=is_row, other=0)
        x = tl.load(coords_ptr + 4 * row + 1, mask=is_row, other=0)
        y = tl.load(coords_ptr + 4 * row + 2, mask=is_row, other=0)
        z = tl.load(coords_ptr + 4 * row + 3, mask=is_row, other=0)
    mask = tl.zeros([BLOCK], tl.int32)
    for k in range(K):
        place = sources_ptr + tl.cast(stride, tl.int64) * k + row
        if MODE == "known":
            source = tl.load(place, mask=is_row, other=-1)
        else:
            dx = (k % SX - BX) * DX
            dy = (k // SX % SY - BY) * DY
            dz = (k // (SX * SY) - BZ) * DZ
            if MODE == "outputs":
                px, py, pz = x * TX + dx, y * TY + dy, z * TZ + dz
                is_in = is_row
            else:
                px, py, pz = (x - dx) // TX, (y - dy) // TY, (z - dz) // TZ
                is_in = is_row & (px * TX == x - dx) & (py * TY == y - dy) & (pz * TZ == z - dz)
            is_in = is_in & (px >= 0) & (py >= 0) & (pz >= 0) & (px < X) & (py < Y) & (pz < Z)
            cell = ((batch.to(tl.int64) * X + px) * Y + py) * Z + pz
            source = tl.load(table_ptr + cell, mask=is_in, other=-1)
            tl.store(place, source, mask=is_row)
        has = (source >= 0).to(tl.int32)
        mask |= has << tl.load(bits_ptr + k)
        tl.store(numbers_ptr + k * blocks + block, tl.sum(has, 0))
    tl.store(masks_ptr + row, mask, mask=is_row)
