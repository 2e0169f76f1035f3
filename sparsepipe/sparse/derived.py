"""What hangs on coordinates, tensor by tensor, so that it can be counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from sparsepipe.sparse.kernel_map import CoordinateCache


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
