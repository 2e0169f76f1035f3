"""Block sizes of the kernels: those measured for a card from a file, else by a rule.

Nothing is tuned while a network trains: other block sizes add numbers in another order, so that
ranks and resumed runs would differ.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import triton
from torch import Tensor

Kind = Literal["pass", "weights"]
"""What a kernel computes: features, or the gradient of weights."""
INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, on a CPU."""
TABLE = Path(__file__).with_name("configurations.csv")
_CHANNELS = 512
_FEW_PROGRAMS = 264
"""Twice the multiprocessors of the largest cards: with fewer programs, blocks are smaller."""


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """How a kernel divides its work.

    Attributes:
        rows: block of the result's rows: input channels for ``weights``, a tile for ``pass``.
        columns: block of the result's columns, output channels.
        reduced: block of what is added up: pairs for ``weights``, input channels for ``pass``.
        warps: number of warps of a program.
        stages: number of blocks that are loaded ahead.
    """

    rows: int
    columns: int
    reduced: int
    warps: int
    stages: int


def configuration(like: Tensor, kind: Kind, channels: int, width: int, rows: int) -> Configuration:
    """Returns the configuration for a kernel.

    Args:
        like: features, whose device and dtype count.
        kind: what the kernel computes.
        channels: number of input channels.
        width: number of output channels.
        rows: number of output rows.
    """
    name = "cpu"
    if like.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(like.device)
        name = f"sm_{major}{minor}"
    bits = 8 * like.element_size()
    sizes = (_up(min(each, _CHANNELS)) for each in (channels, width))
    known = measured().get((name, bits, kind, *sizes))
    if not known:
        return by_rule(kind, bits, channels, width, rows)
    return known[min(known, key=lambda each: (abs(each - rows.bit_length()), each))]


def by_rule(kind: Kind, bits: int, channels: int, width: int, rows: int) -> Configuration:
    """Returns the configuration for sizes that the table lacks.

    Arguments are those of :func:`configuration`; ``bits`` are those of a feature. Large blocks read
    each operand less often; of five stages, loads of indices take two.
    """
    reduced = 64 if bits == 16 else 32
    is_wide = min(channels, width) >= 128
    if kind == "weights":
        most = 128 if is_wide else 64
        height, columns = (min(most, _up(each)) for each in (channels, width))
        return Configuration(height, columns, reduced, warps=8 if is_wide else 4, stages=5)
    reduced = min(reduced, _up(channels))
    for height, warps in ((128, 4), (64, 8)) if is_wide else ():  # 8 spill a few bytes on sm 12.0
        if triton.cdiv(rows, height) * triton.cdiv(width, 128) >= _FEW_PROGRAMS:
            return Configuration(height, 128, reduced, warps, stages=5)
    return Configuration(64, min(64, _up(width)), reduced, warps=4, stages=5)


def _up(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


@cache
def measured() -> dict[tuple[str | int, ...], dict[int, Configuration]]:
    """The configurations in the file, by architecture (such as ``sm_90``), bits of a feature, kind,
    input and output channels, rounded up to powers of 2; then by bits of the number of rows, of
    which the nearest serve for numbers that were not measured.
    """
    found = dict[tuple[str | int, ...], dict[int, Configuration]]()
    with TABLE.open(encoding="ascii", newline="") as file:
        for name, bits, kind, *numbers in list(csv.reader(file))[1:]:
            channels, width, rows, *sizes = map(int, numbers)
            key = (name, int(bits), kind, channels, width)
            found.setdefault(key, {})[rows] = Configuration(*sizes)
    return found


def precision() -> str:
    """Returns the ``input_precision`` of products, which does not matter in 16 bits."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def is_upcast(feats: Tensor) -> bool:
    """Returns whether a product needs float32: the interpreter multiplies bfloat16's bits."""
    return INTERPRETED and feats.dtype == torch.bfloat16
