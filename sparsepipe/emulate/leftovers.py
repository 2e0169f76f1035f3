"""What killed processes have left of emulated clusters, told by names alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sparsepipe.emulate.layout import BLOCKS, Owner
from sparsepipe.errors import HardwareError

_NAMESPACE = re.compile(r"sparsepipe-(\d+)-(\d+)-(\d+)-(?:\d+|switch)")
_CABLE = re.compile(r"spe(\d+)c\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What is to be removed; see :func:`~sparsepipe.emulate.layout.unmaking`."""

    namespaces: tuple[str, ...]
    cables: tuple[str, ...]


def owner_of(namespace: str) -> Owner | None:
    """The process that made a namespace; None: it is none of an emulated cluster."""
    found = _NAMESPACE.fullmatch(namespace)
    return None if found is None else Owner(pid=int(found[1]), started=int(found[2]))


def owners(namespaces: Iterable[str]) -> set[Owner]:
    """All processes that made namespaces."""
    return {owner for name in namespaces if (owner := owner_of(name)) is not None}


def leftovers(
    namespaces: Iterable[str], interfaces: Iterable[str], *, living: Collection[Owner]
) -> Leftovers:
    """What belongs to no living process.

    Args:
        namespaces: all names there are.
        interfaces: all names there are.
        living: of :func:`owners`, those that still run. What lacks the namespaces of its owner,
            which are made first, is a leftover too.
    """
    pids = {owner.pid for owner in living}
    dead = [name for name in namespaces if (owner := owner_of(name)) and owner not in living]
    loose = [
        name
        for name in interfaces
        if (found := _CABLE.fullmatch(name)) and int(found[1]) not in pids
    ]
    return Leftovers(namespaces=tuple(sorted(dead)), cables=tuple(sorted(loose)))


def free_block(namespaces: Iterable[str]) -> int:
    """The least number that no cluster has.

    Raises:
        HardwareError: there is none.
    """
    found = (_NAMESPACE.fullmatch(name) for name in namespaces)
    taken = {int(match[3]) for match in found if match}
    for block in range(BLOCKS):
        if block not in taken:
            return block
    raise HardwareError(
        f"{len(taken)} emulated clusters run on this machine",
        remedy="wait until one of them has ended",
    )
