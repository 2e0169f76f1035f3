"""Longer limits for exchanges with the store, which on a busy machine may answer late.

It does answer where it is on no rank, so ranks of tests wait longer for it than those of users.
With the product's own limits run ranks that the command line starts, and those that call
:func:`restore_limits`.
"""

from __future__ import annotations

from types import ModuleType

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures import missing_ranks

_BUSY_S = 20.0
_LIMITS = (
    (missing_ranks, "_STORE_LIMIT_S"),
    (missing_ranks, "_ANSWER_S"),
    (missing_ranks, "_ROLL_CALL_S"),
    (process_group, "_STORE_LIMIT_S"),
    (process_group, "_JOIN_STORE_LIMIT_S"),
)
_own: list[tuple[ModuleType, str, float]] = []


def raise_limits() -> None:
    """Raises the product's limits in this process, if the launcher keeps the store."""
    if process_group.store_rank() is None:
        _own.extend((module, name, getattr(module, name)) for module, name in _LIMITS)
        for module, name in _LIMITS:
            setattr(module, name, _BUSY_S)


def restore_limits() -> None:
    """Sets the product's own limits again."""
    assert _own, "they are the product's own"
    for module, name, limit_s in _own:
        setattr(module, name, limit_s)
    _own.clear()
