"""What is said when a collective fails: which rank is gone, or did not come, and to what.

The backend knows no ranks, stages or minibatches, and all of a group's connections break with
the first. So ranks that meet in vain say so to each other; whoever does not is missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sparsepipe.errors import SparsePipeError, TransportError
from sparsepipe.runtime.backend import of_backend
from sparsepipe.runtime.waits import AGAIN, GONE, LATE, Wait, WaitBoard, late_text, within

_ROLL_CALL_S = 2.0
"""How long a rank that has met in vain waits for the others to say the same."""
UNREACHED = (
    "see whether that rank has started, and whether the hosts reach each other "
    f"(GLOO_SOCKET_IFNAME names the interface); then {AGAIN}"
)
_LOOK_S = 0.1

_names: list[Callable[[int], str]] = []


def call_ranks(name: Callable[[int], str]) -> None:
    """Sets how messages call a rank from now on; by its number until then."""
    _names[:] = [name]


def name_of(rank: int) -> str:
    """How messages call a rank."""
    return _names[0](rank) if _names else f"rank {rank}"


@contextmanager
def meeting(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Around collectives of a group; errors of the backend become the house's.

    Args:
        what: what the ranks meet for, as "exchanging what was logged".
        group: by default all ranks.

    Raises:
        TransportError: a rank is gone, or did not come within the group's limit.
    """
    among = tuple(dist.get_process_group_ranks(group))
    wait = Wait(waiter=dist.get_rank(), among=among, what=what, message=False)
    with _explaining(wait, limit_s(group)):
        yield


def new_group(ranks: list[int], *, backend: str, timeout_s: float) -> Any:
    """A group whose collectives end within ``timeout_s``; every rank must call it.

    Raises:
        TransportError: a rank did not come within ``timeout_s``.
    """
    wait = Wait(
        waiter=dist.get_rank(),
        among=tuple(range(dist.get_world_size())),
        what="setting up connections",
        message=False,
    )
    make = partial(dist.new_group, ranks, backend=backend, timeout=timedelta(seconds=timeout_s))
    try:
        with _explaining(wait, timeout_s):
            return make() if backend != "gloo" else _limited(make, timeout_s)
    except TransportError as error:
        error.remedy = UNREACHED
        raise


def _limited(make: Callable[[], Any], limit_s: float) -> Any:
    """What ``make`` returns: its words with a store on a stopped rank have no limit."""
    failed: list[Exception] = []

    def run() -> Any:
        try:
            return make()
        except Exception as error:
            failed.append(error)
            raise

    made = within(limit_s, run)
    if failed:
        raise failed[0]
    if made is None:
        raise dist.DistStoreError("timed out")
    return made


@contextmanager
def _explaining(wait: Wait, limit_s: float) -> Iterator[None]:
    board = WaitBoard(store())
    _crier.begin(time.monotonic() + limit_s / 2, partial(board.say, wait))
    try:
        yield
    except RuntimeError as error:
        if not of_backend(type(error).__name__, str(error)):
            raise
        raise _explained(board, wait, error, limit_s) from error
    finally:
        said = _crier.end()
    if said:
        board.take_back(wait)


class _Crier:
    """Says what this rank waits for when half the time is over: one thread for all meetings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due: tuple[float, Callable[[], None]] | None = None
        self._said = False

    def begin(self, at_s: float, say: Callable[[], None]) -> None:
        """Will say it at a time of the monotonic clock, unless the wait ends before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="crier", daemon=True)
            self._thread.start()
        with self._lock:
            self._due, self._said = (at_s, say), False

    def end(self) -> bool:
        """The wait is over; whether it has been spoken of."""
        with self._lock:
            self._due = None
            return self._said

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                if self._due is not None and time.monotonic() > self._due[0]:
                    self._due[1]()
                    self._due, self._said = None, True


_crier = _Crier()


def _explained(board: WaitBoard, wait: Wait, error: RuntimeError, limit_s: float) -> TransportError:
    """What is known of why a meeting failed."""
    me, during = name_of(wait.waiter), f"during {wait.what}"
    board.say(wait)
    if cut_off(board):
        return blaming(wait.waiter, f"{me} is cut off from all others, {during}", remedy=GONE)
    absent, farewells = _roll_call(board, wait)
    if farewells:
        rank, text = next(iter(farewells.items()))
        return blaming(rank, f"{text}; {me} heard of it {during}", remedy=GONE)
    if _timed_out(error):
        vain = board.in_vain(wait)
        text = late_text(vain, rank=wait.waiter, limit_s=limit_s, name=name_of)
        return blaming(vain.missed, text, remedy=LATE)
    who = " or ".join(map(name_of, absent)) or "a rank"
    return blaming(absent, f"{who} is gone: its connection to {me} broke {during}", remedy=GONE)


def _timed_out(error: RuntimeError) -> bool:
    """Whether a limit was reached: gloo's words, or those of the store by which it connects."""
    text = str(error).lower()
    return "timed out" in text or "wait timeout" in text


def _roll_call(board: WaitBoard, wait: Wait) -> tuple[tuple[int, ...], dict[int, str]]:
    """Who does not say that it has met in vain too, and what those said who have ended."""
    others = [rank for rank in wait.among if rank != wait.waiter]
    deadline_s = time.monotonic() + _ROLL_CALL_S
    while True:
        farewells = board.farewells(others)
        absent = board.missed(wait)
        if farewells or len(absent) <= 1 or time.monotonic() > deadline_s:
            return absent, farewells
        time.sleep(0.02)


def blaming(ranks: int | Sequence[int], text: str, *, remedy: str) -> TransportError:
    """An error that names a rank as the cause, or several of which one is."""
    error = TransportError(text, remedy=remedy)
    named = [ranks] if isinstance(ranks, int) else list(ranks)
    error.blamed = named[0] if len(named) == 1 else None
    return error


def cut_off(board: WaitBoard) -> bool:
    """Whether this rank does not even reach the launcher, which outlives all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not board.answers()


def farewell(error: BaseException) -> None:
    """Tells the other ranks why this one ends, before they find it gone."""
    if not isinstance(error, Exception) or not dist.is_initialized():
        return
    me = name_of(dist.get_rank())
    said = error.message if isinstance(error, SparsePipeError) else str(error)
    raised = f"{me} raised {type(error).__name__}: {said}"
    text = error.message if isinstance(error, TransportError) else raised
    WaitBoard(store()).farewell(dist.get_rank(), text)


def store() -> Any:
    """Where the ranks that have joined can leave word for each other."""
    return dist.distributed_c10d._get_default_store()


def limit_s(group: dist.ProcessGroup | None = None) -> float:
    """Of the collectives of a group; by default that of all ranks."""
    made = group or dist.group.WORLD
    assert made is not None
    device = "cpu" if "gloo" in dist.get_backend(made) else "cuda"
    options = made._get_backend(torch.device(device)).options
    return float(options._timeout.total_seconds())
