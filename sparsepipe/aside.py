"""Time that is not a process's own: it waits for others, or makes what others wait for.

Who limits the time of a process listens here, and lets its clock stand meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """What a process is about that is not its own.

    Args:
        what: ``prepares`` (data), or ``waits`` (for another process that does the same).
        limit_s: how long that may take; what goes beyond that is its own time again.
    """

    what: Literal["prepares", "waits"]
    limit_s: float = math.inf


Listener = Callable[[Aside | None], object]
_listeners: list[Listener] = []
_within: list[Aside] = []


@contextmanager
def aside(now: Aside) -> Iterator[None]:
    """Tells listeners that the block is such a thing, and when that is over."""
    _within.append(now)
    _tell()
    try:
        yield
    finally:
        _within.pop()
        _tell()


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Lets a listener hear what begins and ends within the block.

    Args:
        listener: is told what this process is about from now on; None: it is at its own work.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell() -> None:
    now = _within[-1] if _within else None
    for listener in list(_listeners):
        listener(now)
