"""Names the ranks that are missing where a collective, a message or a join fails.

The backend's errors name no ranks, stages or minibatches, and with the first broken connection of a
group all of them break. So ranks leave notes on the store at which they joined: of what they wait
for, once half of the limit is over or a collective has failed. A rank without such a note is
missing; a rank whose peer waits itself follows the notes to the rank that holds them all up. Waits
that end in time, as all do in a run without failures, cost nothing.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
"""How long a store counts as busy. A rank that is cut off names itself as the cause, so it must not
conclude that because the launcher's machine has much to do just then."""
_LOOKS = 10
"""Parts of a wait for the store: while this process itself is held up, no more than one passes."""
_ROLL_CALL_S = 2.0
"""Time for the other ranks to note that a collective has failed for them, too."""
_JOIN_STORE_LIMIT_S = 2.0
_POLL_S = 0.1

AGAIN = "run the command again to go on from the last checkpoint"
REMEDY_GONE = f"see what ended that rank (its own message, or the memory); then {AGAIN}"
REMEDY_LATE = (
    "see whether that rank is stopped or hangs; if it only takes longer, raise timeout_s; "
    f"then {AGAIN}"
)
REMEDY_UNREACHED = (
    "see whether that rank has started, and whether the hosts reach each other "
    f"(GLOO_SOCKET_IFNAME names the interface); then {AGAIN}"
)

_rank_names: list[Callable[[int], str]] = []


def set_rank_names(name: Callable[[int], str]) -> None:
    """Sets how messages call a rank from now on; by its number until then."""
    _rank_names[:] = [name]


def rank_name(rank: int) -> str:
    """How messages call a rank."""
    return _rank_names[0](rank) if _rank_names else f"rank {rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A rank's wait for a message of one peer, or for all ranks of a collective.

    Attributes:
        among: the peer; or the ranks of the collective.
        what: the message, or the purpose of the collective.
        sending: it waits for room to send it, not for its arrival.
    """

    waiter: int
    among: tuple[int, ...]
    what: str
    message: bool = True
    sending: bool = False

    def timeout_message(
        self,
        missing: Sequence[int],
        *,
        rank: int,
        limit_s: float,
        name: Callable[[int], str] = rank_name,
    ) -> str:
        """The error message of ``rank``, which this wait has held up for ``limit_s``."""
        who, waiter = " and ".join(map(name, missing)), name(self.waiter)
        if not self.message:
            text = f"{who} did not take part in {self.what} with {waiter}"
        elif self.sending:
            text = f"{who} took nothing from {waiter}, so {self.what} could not be sent"
        else:
            text = f"{who} did not send {self.what} to {waiter}"
        if self.waiter == rank:
            return f"{text} within {limit_s:g} s"
        return f"{text}; {name(rank)} has waited for that for {limit_s:g} s"


class WaitBoard:
    """Notes of all ranks' long waits.

    The store itself may be on a rank that hangs, so each exchange with it has a limit.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @contextmanager
    def noting(self, wait: Wait, *, limit_s: float) -> Iterator[None]:
        """Notes a wait once half of its limit is over, and removes the note when it ends well."""
        _half_time.begin(time.monotonic() + limit_s / 2, partial(self.note, wait))
        try:
            yield
        finally:
            noted = _half_time.end()
        if noted:
            self._set(wait.waiter, "")

    def note(self, wait: Wait) -> None:
        """Lets the other ranks know of a wait."""
        self._set(wait.waiter, json.dumps(asdict(wait)))

    def holding_up(self, wait: Wait) -> tuple[Wait, tuple[int, ...]]:
        """The wait that holds up this one, and the ranks that it is for."""
        seen, missing = [wait], self.missing(wait)
        while len(missing) == 1 and (following := self._read(missing[0])):
            if following.waiter in {each.waiter for each in seen}:
                break  # a cycle, in which no rank is the cause
            if not (beyond := self.missing(following)):
                break
            seen.append(following)
            missing = beyond
        return seen[-1], missing

    def missing(self, wait: Wait) -> tuple[int, ...]:
        """The ranks that a wait is for: of a collective, those that do not note that they wait."""
        if wait.message:
            return wait.among
        notes = [self._read(rank) for rank in wait.among]
        there = {note.waiter for note in notes if note and _same_collective(note, wait)}
        return tuple(rank for rank in wait.among if rank not in {*there, wait.waiter})

    def cut_off(self) -> bool:
        """Whether this rank does not even reach the launcher, which outlives all ranks.

        A connection that is broken shows at once.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return False
        return call_within(_ANSWER_S, partial(self._store.check, ["sparsepipe/any"])) is None

    def _set(self, rank: int, text: str) -> None:
        call_within(_STORE_LIMIT_S, partial(self._store.set, _wait_key(rank), text))

    def _read(self, rank: int) -> Wait | None:
        key = _wait_key(rank)

        def read() -> str:
            return self._store.get(key).decode() if self._store.check([key]) else ""

        if not (text := call_within(_STORE_LIMIT_S, read)):
            return None
        fields = json.loads(text)
        return Wait(**{**fields, "among": tuple(fields["among"])})


class _HalfTime:
    """Notes what this rank waits for when half of the limit is over: one thread for all waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due: tuple[float, Callable[[], None]] | None = None
        self._noted = False

    def begin(self, at_s: float, note: Callable[[], None]) -> None:
        """Will call ``note`` at a time of the monotonic clock, unless the wait ends before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="half-time", daemon=True)
            self._thread.start()
        with self._lock:
            self._due, self._noted = (at_s, note), False

    def end(self) -> bool:
        """The wait is over; whether it has been noted."""
        with self._lock:
            self._due = None
            return self._noted

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_S)
            with self._lock:
                if self._due is not None and time.monotonic() > self._due[0]:
                    self._due[1]()
                    self._due, self._noted = None, True


_half_time = _HalfTime()


@contextmanager
def collective(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Put around collectives of a group (by default of all ranks) for the purpose ``what``; turns
    errors of the backend into a TransportError.

    Raises:
        TransportError: a rank is gone, or did not take part within the group's limit.
    """
    among = tuple(dist.get_process_group_ranks(group))
    wait = Wait(waiter=dist.get_rank(), among=among, what=what, message=False)
    with _naming_missing(wait, group_limit_s(group)):
        yield


def new_group(ranks: list[int], *, backend: str, timeout_s: float) -> Any:
    """A group whose collectives end within ``timeout_s``; every rank must call it."""
    wait = Wait(
        waiter=dist.get_rank(),
        among=tuple(range(dist.get_world_size())),
        what="setting up connections",
        message=False,
    )
    make = partial(dist.new_group, ranks, backend=backend, timeout=timedelta(seconds=timeout_s))
    try:
        with _naming_missing(wait, timeout_s):
            return make() if backend != "gloo" else _limited(make, timeout_s)
    except TransportError as error:
        error.remedy = REMEDY_UNREACHED
        raise


def _limited(make: Callable[[], Any], limit_s: float) -> Any:
    """Calls ``make`` within a limit: gloo waits without one for a store on a stopped rank."""
    failed: list[Exception] = []

    def run() -> Any:
        try:
            return make()
        except Exception as error:
            failed.append(error)
            raise

    made = call_within(limit_s, run)
    if failed:
        raise failed[0]
    if made is None:
        raise dist.DistStoreError("timed out")
    return made


@contextmanager
def _naming_missing(wait: Wait, limit_s: float) -> Iterator[None]:
    board = WaitBoard(store())
    with board.noting(wait, limit_s=limit_s):
        try:
            yield
        except RuntimeError as error:
            if not is_backend_error(type(error).__name__, str(error)):
                raise
            raise _collective_error(board, wait, error, limit_s) from error


def _collective_error(
    board: WaitBoard, wait: Wait, error: RuntimeError, limit_s: float
) -> TransportError:
    """Why a collective failed, as far as known."""
    rank, during = wait.waiter, f"during {wait.what}"
    me = rank_name(rank)
    board.note(wait)
    if board.cut_off():
        return TransportError(f"{me} is cut off from all others, {during}", remedy=REMEDY_GONE)
    absent = _absent(board, wait)
    text = str(error).lower()
    if "timed out" in text or "wait timeout" in text:  # gloo's text, and the store's
        last, missing = board.holding_up(wait)
        message = last.timeout_message(missing, rank=rank, limit_s=limit_s)
        return TransportError(message, remedy=REMEDY_LATE)
    who = " or ".join(map(rank_name, absent)) or "a rank"
    message = f"{who} is gone: its connection to {me} broke {during}"
    return TransportError(message, remedy=REMEDY_GONE)


def _absent(board: WaitBoard, wait: Wait) -> tuple[int, ...]:
    """The ranks for which the collective has not failed, too, as far as they note it in time."""
    deadline_s = time.monotonic() + _ROLL_CALL_S
    while len(absent := board.missing(wait)) > 1 and time.monotonic() <= deadline_s:
        time.sleep(0.02)
    return absent


class JoinRoll:
    """Which ranks have come to join; before that they share nothing but a store.

    Args:
        store_rank: the rank whose process keeps the store; None: the launcher does.
        limit_s: of the joining.
    """

    def __init__(self, rank: int, *, count: int, store_rank: int | None, limit_s: float) -> None:
        self._rank = rank
        self._count = count
        self._store_rank = store_rank
        self._limit_s = limit_s
        self._store: Any = None

    def sign(self, store: Any) -> None:
        """Lets the others know that this rank has come, at a store of this joining alone."""
        self._store = store
        store.set(_join_key(self._rank), "1")

    @contextmanager
    def naming_missing(self) -> Iterator[None]:
        """Put around all of the joining; turns errors of the backend into a TransportError.

        Raises:
            TransportError: not all ranks came within the limit, or one left while others joined.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_backend_error(type(error).__name__, str(error)):
                raise
            raise TransportError(self._reason(error), remedy=REMEDY_UNREACHED) from error

    def _reason(self, error: RuntimeError) -> str:
        me, in_time = rank_name(self._rank), f"within {self._limit_s:g} s"
        if self._store is None and self._store_rank == self._rank:  # which counts them only
            found = re.search(r"(\d+)/\d+ clients joined", str(error))
            came = "not all" if found is None else found[1]
            return f"{came} of {self._count} ranks came to join {in_time}"
        absent = None
        if self._store is not None:
            absent = call_within(_JOIN_STORE_LIMIT_S, self._absent)
        if absent is None:
            if self._store_rank is None:
                return f"{me} does not reach the launcher, at which all ranks join"
            return f"{rank_name(self._store_rank)}, at which all ranks join, does not answer {me}"
        if not absent:
            first_line = str(error).partition("\n")[0]
            return f"all ranks came to join, but {me} could not connect to all others: {first_line}"
        return f"{' and '.join(map(rank_name, absent))} did not come to join {me} {in_time}"

    def _absent(self) -> list[int]:
        return [rank for rank in range(self._count) if not self._store.check([_join_key(rank)])]


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def group_limit_s(group: dist.ProcessGroup | None = None) -> float:
    """The limit of the collectives of a group; by default of that of all ranks."""
    made = group or dist.group.WORLD
    assert made is not None
    device = "cpu" if "gloo" in dist.get_backend(made) else "cuda"
    options = made._get_backend(torch.device(device)).options
    return float(options._timeout.total_seconds())


def call_within(limit_s: float, function: Callable[[], _Value]) -> _Value | None:
    """Calls ``function`` in a thread; None if it takes too long or fails."""
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


def _same_collective(note: Wait, wait: Wait) -> bool:
    return (note.message, note.among, note.what) == (wait.message, wait.among, wait.what)


def _wait_key(rank: int) -> str:
    return f"sparsepipe/waits/{rank}"


def _join_key(rank: int) -> str:
    return f"sparsepipe/came/{rank}"
