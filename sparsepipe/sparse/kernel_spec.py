"""The geometry of a convolution or pooling window."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparsepipe.errors import ConfigError

Triple = tuple[int, int, int]


def as_triple(value: int | Sequence[int], *, name: str) -> Triple:
    """Returns ``value`` as (x, y, z); a single int, also one of numpy's, counts for all axes.

    Raises:
        ConfigError: ``value`` is not one or three integers of at least 1.
    """
    try:
        x, y, z = map(operator.index, value if isinstance(value, Iterable) else (value,) * 3)
    except (TypeError, ValueError):
        x = y = z = 0
    if min(x, y, z) < 1:
        raise ConfigError(
            f"{name} is {value!r}, not one or three positive ints",
            remedy="give one int or three ints (x, y, z) of at least 1",
        )
    return x, y, z


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Size, stride and dilation of a window, each per axis (x, y, z).

    An odd size is centred (offsets ``-(K//2) .. K//2``); an even size, or any size with
    ``centred=False``, starts at the site (offsets ``0 .. K-1``). Offsets are multiplied by the
    dilation. An output site reads the inputs at ``site * stride + offset * dilation``.

    Attributes:
        volume: number of offsets, K^3 for a cube.
        before: number of offsets below zero, per axis.
        reach: largest distance per axis, in input voxels, from a site to what its window reads.
        is_submanifold: whether the output sites are the input sites (stride 1).
        is_symmetric: whether offset ``k`` is minus offset ``volume - 1 - k`` and the stride is 1.
        centre: index of the offset 0 of a symmetric window, where sites read themselves; or None.
        is_tiling: whether every input is in exactly one window, because size and stride are equal;
            centred windows, which are cut off at the grid's border, do not tile.
    """

    size: Triple
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    centred: bool = True
    volume: int = field(init=False, compare=False, repr=False)
    before: Triple = field(init=False, compare=False, repr=False)
    reach: Triple = field(init=False, compare=False, repr=False)
    is_submanifold: bool = field(init=False, compare=False, repr=False)
    is_symmetric: bool = field(init=False, compare=False, repr=False)
    centre: int | None = field(init=False, compare=False, repr=False)
    is_tiling: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        volume, is_submanifold = math.prod(self.size), self.stride == (1, 1, 1)
        is_symmetric = is_submanifold and self.centred and all(k % 2 == 1 for k in self.size)
        before = tuple(k // 2 if k % 2 and self.centred else 0 for k in self.size)
        derived = {
            "volume": volume,
            "before": before,
            "reach": tuple(
                d * max(b, k - 1 - b)
                for k, d, b in zip(self.size, self.dilation, before, strict=True)
            ),
            "is_submanifold": is_submanifold,
            "is_symmetric": is_symmetric,
            "centre": volume // 2 if is_symmetric else None,
            "is_tiling": self.size == self.stride
            and not any(before)
            and all(d == 1 or k == 1 for d, k in zip(self.dilation, self.size, strict=True)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        size: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
    ) -> KernelSpec:
        """Builds a spec from ints or triples of ints, all at least 1."""
        return cls(
            as_triple(size, name="kernel size"),
            as_triple(stride, name="stride"),
            as_triple(dilation, name="dilation"),
        )

    @classmethod
    def for_pooling(
        cls, size: int | Sequence[int], *, stride: int | Sequence[int] | None = None
    ) -> KernelSpec:
        """Builds a pooling window; with equal size and stride (the default), windows tile the grid.

        Pooling by 3 combines voxels 0 to 2, 3 to 5 and so on, as dense pooling does.
        """
        size_3 = as_triple(size, name="kernel size")
        stride_3 = size_3 if stride is None else as_triple(stride, name="stride")
        has_centre = any(k % 2 == 1 and k > 1 for k in size_3)
        return cls(size_3, stride_3, centred=not (has_centre and size_3 == stride_3))

    def offsets(self) -> list[Triple]:
        """Returns all offsets (dx, dy, dz), multiplied by the dilation, x fastest."""
        xs, ys, zs = (
            [d * (i - before) for i in range(k)]
            for k, d, before in zip(self.size, self.dilation, self.before, strict=True)
        )
        return [(x, y, z) for z in zs for y in ys for x in xs]
