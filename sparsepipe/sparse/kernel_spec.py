"""The geometry of a convolution or pooling window."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparsepipe.errors import ConfigError

Triple = tuple[int, int, int]


def as_triple(value: int | Sequence[int], *, name: str) -> Triple:
    """Three ints; a single int, also one of numpy's, applies to all three axes.

    Raises:
        ConfigError: not one or three integers, or one of them below 1.
    """
    try:
        x, y, z = map(operator.index, value if isinstance(value, Iterable) else (value,) * 3)
    except (TypeError, ValueError):
        x = y = z = 0
    if min(x, y, z) < 1:
        raise ConfigError(
            f"{name} is {value!r}", remedy="give one int or three ints (x, y, z) of at least 1"
        )
    return x, y, z


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Size, stride and dilation of a window, each per axis (x, y, z).

    An odd size is centred (offsets ``-(K//2) .. K//2``); an even size, or any size with
    ``centred=False``, starts at the site (offsets ``0 .. K-1``). Offsets are multiplied by the
    dilation. Output site ``y`` reads the inputs
    ``y * stride + offset * dilation``.
    """

    size: Triple
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    centred: bool = True

    @classmethod
    def of(
        cls,
        size: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
    ) -> KernelSpec:
        """A spec of ints or triples, each positive."""
        return cls(
            as_triple(size, name="kernel size"),
            as_triple(stride, name="stride"),
            as_triple(dilation, name="dilation"),
        )

    @classmethod
    def for_pooling(
        cls, size: int | Sequence[int], *, stride: int | Sequence[int] | None = None
    ) -> KernelSpec:
        """A pooling window; with equal size and stride (the default) the windows tile the grid.

        Pooling by 3 combines voxels 0 to 2, 3 to 5 and so on, as dense pooling does.
        """
        size_3 = as_triple(size, name="kernel size")
        stride_3 = size_3 if stride is None else as_triple(stride, name="stride")
        has_centre = any(k % 2 == 1 and k > 1 for k in size_3)
        return cls(size_3, stride_3, centred=not (has_centre and size_3 == stride_3))

    @property
    def volume(self) -> int:
        """Number of offsets, K^3 for a cube."""
        return math.prod(self.size)

    @property
    def is_submanifold(self) -> bool:
        """True when the output sites are the input sites (stride 1)."""
        return self.stride == (1, 1, 1)

    @property
    def is_symmetric(self) -> bool:
        """True when offset ``k`` is minus offset ``volume - 1 - k`` and the stride is 1."""
        return self.is_submanifold and self.centred and all(k % 2 == 1 for k in self.size)

    @property
    def centre(self) -> int | None:
        """The offset at which every row of a symmetric window reads itself."""
        return self.volume // 2 if self.is_symmetric else None

    @property
    def is_tiling(self) -> bool:
        """True when every input is in exactly one window, because size and stride are equal.

        False for centred windows, which are cut off at the grid's border.
        """
        return (
            self.size == self.stride
            and not any(self.before)
            and all(d == 1 or k == 1 for d, k in zip(self.dilation, self.size, strict=True))
        )

    @property
    def reach(self) -> Triple:
        """The largest distance per axis, in input voxels, from a site to what its window reads."""
        x, y, z = (
            d * max(before, k - 1 - before)
            for k, d, before in zip(self.size, self.dilation, self.before, strict=True)
        )
        return x, y, z

    @property
    def before(self) -> Triple:
        """The number of offsets below zero, per axis."""
        x, y, z = (k // 2 if k % 2 and self.centred else 0 for k in self.size)
        return x, y, z

    def offsets(self) -> list[Triple]:
        """All offsets (dx, dy, dz), multiplied by the dilation, x fastest."""
        xs, ys, zs = (
            [d * (i - before) for i in range(k)]
            for k, d, before in zip(self.size, self.dilation, self.before, strict=True)
        )
        return [(x, y, z) for z in zs for y in ys for x in xs]
