"""Names the ranks that are missing when a collective or a message fails.

The backend's errors name no ranks, and after the first broken connection of a group all others
break too. So each rank that sees a failure signs a roll in the store through which all ranks have
joined. A rank that does not sign within seconds is missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sparsepipe.errors import TransportError
from sparsepipe.runtime.failures.rank_reports import is_backend_error

_Value = TypeVar("_Value")
_STORE_LIMIT_S = 1.0
_ANSWER_S = 5.0
"""Seconds without an answer of the launcher's store after which a rank counts as cut off."""
_LOOKS = 10
"""Number of parts of a wait for the store; while this process is stopped, only one can run out."""
_ROLL_CALL_S = 2.0
"""Seconds for the other ranks to sign the roll after a collective failed for them too."""

AGAIN = "run the command again to go on from the last checkpoint"
REMEDY_GONE = (
    "check whether a process ended (see its own message; memory may have run out) or the network "
    f"failed; then {AGAIN}"
)
REMEDY_LATE = (
    "check whether a process is stopped or hangs; if it only takes longer, raise timeout_s; "
    f"then {AGAIN}"
)
REMEDY_UNREACHED = (
    "check whether all ranks have started, and whether the hosts reach each other "
    f"(GLOO_SOCKET_IFNAME names the interface); then {AGAIN}"
)

_rank_names: list[Callable[[int], str]] = []


def set_rank_names(name: Callable[[int], str]) -> None:
    _rank_names[:] = [name]


def rank_name(rank: int) -> str:
    """Name of a rank in messages: its number until :func:`set_rank_names` is called."""
    return _rank_names[0](rank) if _rank_names else f"rank {rank}"


@contextmanager
def collective(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context of a group's collectives (None: all ranks); its TransportErrors name ``what``."""
    try:
        yield
    except RuntimeError as error:
        if not is_backend_error(type(error).__name__, str(error)):
            raise
        ranks = dist.get_process_group_ranks(group)
        raise _collective_error(error, what, ranks, limit_s=group_limit_s(group)) from error


def new_group(ranks: list[int], *, backend: str, timeout_s: float) -> Any:
    """Makes a process group whose collectives end within ``timeout_s``; every rank must call it."""
    found: list[Any] = []

    def make() -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            found.append(dist.new_group(ranks, backend=backend, timeout=limit))
        except RuntimeError as error:
            found.append(error)

    if backend == "gloo":  # which waits without a limit for a store on a stopped rank
        call_within(timeout_s, make)
    else:
        make()
    made = found[0] if found else dist.DistStoreError("timed out")
    if not isinstance(made, RuntimeError):
        return made
    if not is_backend_error(type(made).__name__, str(made)):
        raise made
    everybody = list(range(dist.get_world_size()))
    failed = _collective_error(made, "setting up connections", everybody, limit_s=timeout_s)
    failed.remedy = REMEDY_UNREACHED
    raise failed from made


def _collective_error(
    error: RuntimeError, what: str, ranks: list[int], *, limit_s: float
) -> TransportError:
    mine = dist.get_rank()
    me = rank_name(mine)
    sign_roll()
    if is_cut_off():
        return TransportError(f"{me} is cut off from all others during {what}", remedy=REMEDY_GONE)
    absent = [rank for rank in ranks if rank != mine]
    deadline_s = time.monotonic() + _ROLL_CALL_S
    while len(absent) > 1 and time.monotonic() <= deadline_s:
        keys = {rank: f"sparsepipe/failed/{rank}" for rank in absent}
        absent = [
            rank
            for rank, key in keys.items()
            if not call_within(_STORE_LIMIT_S, partial(store().check, [key]))
        ]
        time.sleep(0.02)
    text = str(error).lower()
    if "timed out" in text or "wait timeout" in text:  # gloo's text, and the store's
        who = " and ".join(map(rank_name, absent)) or "another rank"
        message = f"{who} did not take part in {what} with {me} within {limit_s:g} s"
        remedy = REMEDY_LATE
    else:
        who = " or ".join(map(rank_name, absent)) or "another rank"
        message, remedy = f"{who} is gone: its connection to {me} broke during {what}", REMEDY_GONE
    found = TransportError(message, remedy=remedy)
    found.ranks = tuple(absent or (rank for rank in ranks if rank != mine))
    return found


def sign_roll() -> None:
    """Signs the roll, so that the other ranks know that this one runs, though it saw a failure."""
    key = f"sparsepipe/failed/{dist.get_rank()}"
    call_within(_STORE_LIMIT_S, lambda: store().set(key, "1"))


def is_cut_off() -> bool:
    """Whether this rank cannot reach the launcher, which outlives all ranks; False without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return call_within(_ANSWER_S, partial(store().check, ["sparsepipe/any"])) is None


def store() -> Any:
    """The key-value store of the default process group, through which the ranks joined."""
    return dist.distributed_c10d._get_default_store()


def group_limit_s(group: dist.ProcessGroup | None = None) -> float:
    """Time limit in seconds of the collectives of a group, by default the group of all ranks."""
    made = group or dist.group.WORLD
    assert made is not None
    device = "cpu" if "gloo" in dist.get_backend(made) else "cuda"
    options = made._get_backend(torch.device(device)).options
    return float(options._timeout.total_seconds())


def call_within(limit_s: float, function: Callable[[], _Value]) -> _Value | None:
    """Returns ``function()``, called in a thread; None if it fails or takes more than ``limit_s``.

    Without a limit, a request to the store of a rank that is stopped could wait for ever.
    """
    found: list[_Value] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception:
            return  # the store is gone

    thread = threading.Thread(target=run, name="call-within", daemon=True)
    thread.start()
    for _ in range(_LOOKS):
        thread.join(limit_s / _LOOKS)
        if not thread.is_alive():
            break
    return found[0] if found else None
