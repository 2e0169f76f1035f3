"""Makes the hosts of an emulated cluster, and removes them after use.

The next process that emulates a cluster, with or without hosts, removes what a killed process has
left behind: the names of namespaces contain the id of the process that made them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.emulate import machine
from sparsepipe.emulate.layout import Layout, free_block, lay_out, leftovers, making, owners
from sparsepipe.errors import HardwareError
from sparsepipe.utils.files import LockHeldError, file_lock

log = logging.getLogger(__name__)

_LOCK = Path("/run/sparsepipe-emulate.lock")
_LOCK_LIMIT_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def emulated_hosts(inventory: Inventory, *, time_scale: float = 1.0) -> Iterator[Layout]:
    """Emulates the hosts as network namespaces of this machine for a block; yields their layout.

    First removes what killed emulations left behind. Links are ``time_scale`` times slower.

    Raises:
        NotPermitted: this process may not make namespaces.
    """
    owner = machine.owner_of(os.getpid())
    assert owner is not None, "this process lives"
    lay_out(inventory, owner=owner, block=0, time_scale=time_scale)  # refuses inventories early
    layout: Layout | None = None
    try:
        with _administering():
            remove_leftovers()
            block = free_block(machine.namespaces())
            layout = lay_out(inventory, owner=owner, block=block, time_scale=time_scale)
            for command in making(layout):
                machine.do(command)
        rate, hosts = layout.rate_bytes_per_s, len(layout.stations)
        log.info("%d hosts as network namespaces, joined at %.4g MB/s", hosts, rate / 1e6)
        yield layout
    finally:
        if layout is not None:
            with signals_held():
                remove(layout.namespaces, [station.cable for station in layout.stations])


def clear() -> None:
    """Removes what killed emulations have left; logs a warning if this is not permitted."""
    namespaces, cables = _left_over()
    try:
        if namespaces or cables:
            with _administering():
                remove_leftovers()
    except HardwareError as error:
        _warn_of((*namespaces, *cables), error.message)


def remove_leftovers() -> None:
    """Removes namespaces, with their processes, and interfaces of clusters whose process ended."""
    namespaces, cables = _left_over()
    if namespaces or cables:
        names = ", ".join((*namespaces, *cables))
        log.info("removing leftovers of an emulated cluster whose process was killed: %s", names)
        remove(namespaces, cables)


def _left_over() -> tuple[list[str], list[str]]:
    there = machine.namespaces()
    living = {owner for owner in owners(there).values() if machine.owner_of(owner.pid) == owner}
    return leftovers(there, machine.interfaces(), living=living)


def remove(namespaces: Sequence[str], cables: Sequence[str]) -> None:
    """Ends the processes in ``namespaces``, removes these and ``cables``, and warns of failures."""
    there = [name for name in namespaces if name in machine.namespaces()]
    for pid in machine.end_processes(there):
        log.warning(
            "process %d of an emulated cluster is still running although it was killed", pid
        )
    failed: dict[str, str] = {}
    loose = [name for name in cables if name in machine.interfaces()]
    commands = [("ip", "link", "del", cable) for cable in loose]
    for command in [*commands, *(("ip", "netns", "del", name) for name in there)]:
        try:
            machine.do(command)
        except HardwareError as error:
            failed[command[-1]] = error.message
    still = {*machine.namespaces(), *machine.interfaces()}
    if left := [name for name in failed if name in still]:
        _warn_of(left, failed[left[0]])


def _warn_of(names: Sequence[str], why: str) -> None:
    log.warning(
        "leftovers of an emulated cluster cannot be removed: %s, since %s; as root, start another "
        "emulation, which removes them, or use `ip netns del` for sparsepipe-... and `ip link del` "
        "for spe...",
        ", ".join(names),
        why,
    )


@contextmanager
def _administering() -> Iterator[None]:
    """Locks out other emulations on this machine; delays signals that would end the block."""
    if not machine.may_administer():
        raise machine.NotPermitted(
            "this process may not make network namespaces",
            remedy="run as root, or with CAP_NET_ADMIN and CAP_SYS_ADMIN, or set "
            "hardware.network=loopback, which limits no link",
        )
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(_LOCK, wait_s=_LOCK_LIMIT_S))
        except LockHeldError:
            raise HardwareError(
                f"another emulation has held the lock {_LOCK} for {_LOCK_LIMIT_S:g} s",
                remedy=f"find its process with `fuser {_LOCK}`; if it hangs, end it, then run the "
                "command again",
            ) from None
        except OSError as error:
            raise machine.refusal(("open", str(_LOCK)), error.strerror or "") from error
        held.enter_context(signals_held())
        yield


@contextmanager
def signals_held() -> Iterator[None]:
    """Delays signals that would end this process until the block ends, then raises the first one.

    Drops the others, since a second signal would make a handler end the process at once.
    """
    came: list[int] = []
    # They are blocked as well for commands started in the block, which also get a terminal's
    # Ctrl-C. Blocking alone is not enough: threads of libraries would take the signals.
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        handlers = {s: h for s, h in found.items() if h not in (signal.SIG_IGN, None)}
        for signum in handlers:
            signal.signal(signum, lambda signum, frame: came.append(signum))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if came:
            signal.raise_signal(came[0])
