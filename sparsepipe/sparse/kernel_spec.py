"""The geometry of a convolution or pooling window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.errors import ConfigError

Triple = tuple[int, int, int]


def as_triple(value: int | Sequence[int], *, name: str, minimum: int = 1) -> Triple:
    """Return ``value`` as three ints; one int stands for all three axes.

    Raises:
        ConfigError: not one or three ints, or one of them below ``minimum``.
    """
    values = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(values) != 3 or not all(isinstance(v, int) and v >= minimum for v in values):
        raise ConfigError(
            f"{name} is {value!r}",
            remedy=f"give one int or three ints (x, y, z) of at least {minimum}",
        )
    return values[0], values[1], values[2]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Size, stride and dilation of a window, each per axis (x, y, z).

    An odd size is centred (offsets ``-(K//2) .. K//2``), an even one starts at the
    site (offsets ``0 .. K-1``), as does every window that tiles the grid (size equal to
    stride on every axis); offsets are multiplied by the dilation. Output site ``y``
    reads the inputs ``y * stride + offset * dilation``.
    """

    size: Triple
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)

    @classmethod
    def of(
        cls,
        size: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
    ) -> KernelSpec:
        """Build a spec from ints or triples.

        Raises:
            ConfigError: a value is not one or three positive ints.
        """
        return cls(
            as_triple(size, name="kernel size"),
            as_triple(stride, name="stride"),
            as_triple(dilation, name="dilation"),
        )

    @property
    def volume(self) -> int:
        """Number of offsets, K^3 for a cube."""
        return math.prod(self.size)

    @property
    def is_submanifold(self) -> bool:
        """True when the output sites are the input sites (stride 1)."""
        return self.stride == (1, 1, 1)

    @property
    def is_pointwise(self) -> bool:
        """True for a 1x1x1 window of stride 1, a plain matrix product."""
        return self.volume == 1 and self.is_submanifold

    @property
    def is_symmetric(self) -> bool:
        """True when offset ``k`` is minus offset ``volume - 1 - k`` and sites stay."""
        return self.is_submanifold and all(size % 2 == 1 for size in self.size)

    @property
    def is_tiling(self) -> bool:
        """True when the windows tile the grid: every input is in exactly one."""
        return self.size == self.stride and all(
            d == 1 or k == 1 for d, k in zip(self.dilation, self.size, strict=True)
        )

    @property
    def reach(self) -> Triple:
        """How far, per axis, a window reads beyond its site (in input voxels)."""
        x, y, z = (
            d * max(before, k - 1 - before)
            for k, d, before in zip(self.size, self.dilation, self.before, strict=True)
        )
        return x, y, z

    @property
    def before(self) -> Triple:
        """How many offsets, per axis, are below zero."""
        if self.is_tiling:
            return 0, 0, 0
        x, y, z = (k // 2 if k % 2 else 0 for k in self.size)
        return x, y, z

    def offsets(self) -> list[Triple]:
        """The ``volume`` offsets (dx, dy, dz) with dilation applied, x fastest."""
        xs, ys, zs = (
            [d * (i - before) for i in range(k)]
            for k, d, before in zip(self.size, self.dilation, self.before, strict=True)
        )
        return [(x, y, z) for z in zs for y in ys for x in xs]
