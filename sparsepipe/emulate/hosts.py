"""Makes the hosts of an emulated cluster, and removes them on every way out.

What a process that was killed has left is removed by the next one that emulates, with hosts of
its own or without: the names of namespaces say whose they are.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sparsepipe.cluster import Inventory
from sparsepipe.emulate import machine
from sparsepipe.emulate.holding import signals_held
from sparsepipe.emulate.layout import Layout, lay_out, making, unmaking
from sparsepipe.emulate.leftovers import Leftovers, free_block, leftovers, owners
from sparsepipe.errors import HardwareError

log = logging.getLogger(__name__)

_LOCK = "/run/sparsepipe-emulate.lock"
_LOCK_LIMIT_S = 60.0
_POLL_S = 0.05
_FASTEST_BYTES_PER_S = 1e9


@contextmanager
def emulated_hosts(inventory: Inventory, *, time_scale: float = 1.0) -> Iterator[Layout]:
    """Hosts as namespaces of this machine, as long as the block runs.

    Begins by removing what is left of clusters whose process was killed, their processes too.

    Args:
        inventory: several hosts and the link between them.
        time_scale: how many times slower the links are made.

    Raises:
        NotPermitted: this process may not make namespaces.
        HardwareError: they cannot be made, or the link cannot be emulated.
    """
    owner = machine.this_process()
    lay_out(inventory, owner=owner, block=0, time_scale=time_scale)  # refused before it is begun
    _check_permission()
    layout: Layout | None = None
    try:
        with _locked(), signals_held():
            sweep()
            block = free_block(machine.namespaces())
            layout = lay_out(inventory, owner=owner, block=block, time_scale=time_scale)
            for command in making(layout):
                machine.do(command)
        _tell(layout)
        yield layout
    finally:
        if layout is not None:
            with signals_held():
                remove(layout.namespaces, layout.cables)


def clear() -> None:
    """Does :func:`sweep` where this process may; what keeps it from that is told, no error."""
    found = _left_over()
    if not (found.namespaces or found.cables):
        return
    try:
        _check_permission()
        with _locked(), signals_held():
            sweep()
    except HardwareError as error:
        _tell_left((*found.namespaces, *found.cables), error.message)


def sweep() -> None:
    """Removes what is left of clusters whose process has ended without removing it."""
    found = _left_over()
    if found.namespaces or found.cables:
        log.info(
            "removing what a killed process has left of an emulated cluster: %s",
            ", ".join((*found.namespaces, *found.cables)),
        )
        remove(found.namespaces, found.cables)


def _left_over() -> Leftovers:
    there = machine.namespaces()
    return leftovers(there, machine.interfaces(), living=machine.living(owners(there)))


def remove(namespaces: Sequence[str], cables: Sequence[str]) -> None:
    """Ends the processes of namespaces and removes these; what cannot be removed is told."""
    there = [name for name in namespaces if name in machine.namespaces()]
    for pid in machine.end_processes(there):
        log.warning("process %d of an emulated cluster does not end", pid)
    failed: dict[str, str] = {}
    for command in unmaking(there, [name for name in cables if name in machine.interfaces()]):
        try:
            machine.do(command)
        except HardwareError as error:
            failed[command[-1]] = error.message
    still = {*machine.namespaces(), *machine.interfaces()}
    if left := [name for name in failed if name in still]:
        _tell_left(left, failed[left[0]])


def _tell_left(names: Sequence[str], why: str) -> None:
    log.warning(
        "still there of an emulated cluster that has ended: %s, since %s; the next emulation that "
        "root starts removes it, or one with CAP_NET_ADMIN and CAP_SYS_ADMIN; else root may do so, "
        "by `ip netns del` for sparsepipe-... and `ip link del` for spe..., or restart the machine",
        ", ".join(names),
        why,
    )


def _check_permission() -> None:
    if not machine.may_administer():
        raise machine.NotPermitted(
            "this process may not make network namespaces",
            remedy="run as root, or with CAP_NET_ADMIN and CAP_SYS_ADMIN, or set "
            "hardware.network=loopback, which limits no link",
        )


def _tell(layout: Layout) -> None:
    log.info(
        "%d hosts as network namespaces, joined at %.4g MB/s",
        len(layout.stations),
        layout.rate_bytes_per_s / 1e6,
    )
    if layout.rate_bytes_per_s > _FASTEST_BYTES_PER_S:
        log.warning(
            "%.4g MB/s between hosts may be more than this machine can move: raise "
            "hardware.time_scale",
            layout.rate_bytes_per_s / 1e6,
        )


@contextmanager
def _locked() -> Iterator[None]:
    """One process at a time makes a cluster; the file stays, empty.

    Raises:
        NotPermitted: it cannot be made.
        HardwareError: another process has taken too long.
    """
    try:
        handle = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise machine.refusal(("open", _LOCK), error.strerror or "") from error
    try:
        _acquire(handle)
        yield
    finally:
        os.close(handle)


def _acquire(handle: int) -> None:
    deadline_s = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline_s:
                raise HardwareError(
                    f"another process has been making an emulated cluster for {_LOCK_LIMIT_S:g} s",
                    remedy=f"see who holds {_LOCK} (`fuser {_LOCK}`) and whether it hangs; end "
                    "it, then run the command again",
                ) from error
            time.sleep(_POLL_S)
        else:
            return
