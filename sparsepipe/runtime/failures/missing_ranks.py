"""Who waits for whom: so that the rank that is named is the one that holds all up.

When a rank stands still, its peers wait for it, their peers for them, and whoever began
first gives up first. Therefore ranks that have waited for half their limit say so on the
store at which they met, and one that gives up follows these words to the end. Waits that
are met in time, which is all of them in a good run, cost nothing.
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

from sparsepipe.errors import SparsePipeError, TransportError
from sparsepipe.runtime.failures.rank_reports import is_backend_error

_Value = TypeVar("_Value")
_STORE_LIMIT_S = 1.0
_ANSWER_S = 5.0
"""How long a store is believed to be busy: a rank that is cut off blames itself, so it must not
think so because the launcher's machine has much to do just then."""
_LOOKS = 10
"""Parts of a wait for the store: while this process itself is held up, no more than one passes."""

AGAIN = "run the command again to go on from the last checkpoint"
GONE = f"see what ended that rank (its own message, or the memory); then {AGAIN}"
LATE = (
    "see whether that rank is stopped or hangs; if it only takes longer, raise timeout_s; "
    f"then {AGAIN}"
)


class WaitTimedOut(Exception):
    """A wait has reached its limit.

    Args:
        chain: this wait, then that of the rank it is for, and so on to a rank that does not
            wait, as far as is known.
        missed: whom the last of these waits is for.
    """

    def __init__(self, chain: Sequence[Wait], missed: Sequence[int]) -> None:
        super().__init__(chain, missed)
        self.chain = chain
        self.missed = missed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a rank waits for: a message of one peer, or all ranks of a collective.

    Attributes:
        waiter: the rank.
        among: the peer; or the ranks of the collective.
        what: the message, or what the collective is for.
        message: it is one.
        sending: it waits for room to send it, not for it to come.
    """

    waiter: int
    among: tuple[int, ...]
    what: str
    message: bool = True
    sending: bool = False


class WaitBoard:
    """Long waits of all ranks.

    The store itself may be on a rank that stands still, so every word with it has a limit.

    Args:
        store: the one at which the ranks met.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def wait(self, wait: Wait, take: Callable[[float], _Value], *, limit_s: float) -> _Value:
        """What ``take`` gives within the limit.

        Args:
            wait: what for.
            take: waits for at most the seconds that it is given, then raises TimeoutError.
            limit_s: of the whole wait.

        Raises:
            WaitTimedOut: the limit is reached.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            return take(limit_s / 2)
        except TimeoutError:
            self.say(wait)
        try:
            value = take(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            raise self.in_vain(wait) from None
        self.take_back(wait)
        return value

    def say(self, wait: Wait) -> None:
        """Lets the others know of a wait."""
        self._set(wait.waiter, json.dumps(asdict(wait)))

    def take_back(self, wait: Wait) -> None:
        """The wait has been met."""
        self._set(wait.waiter, "")

    def in_vain(self, wait: Wait) -> WaitTimedOut:
        """Where a wait that reached its limit leads to."""
        chain = [wait]
        missed = self.missed(wait)
        while len(missed) == 1 and (following := self._read(missed[0])):
            if following.waiter in {link.waiter for link in chain}:
                break  # a circle, in which nobody is more at fault than another
            beyond = self.missed(following)
            if not beyond:
                break
            chain.append(following)
            missed = beyond
        return WaitTimedOut(chain, missed)

    def missed(self, wait: Wait) -> tuple[int, ...]:
        """Whom a wait is for: of a collective, those who do not say that they wait there."""
        if wait.message:
            return wait.among
        found = [self._read(rank) for rank in wait.among]
        there = {word.waiter for word in found if word and _together(word, wait)}
        return tuple(rank for rank in wait.among if rank not in {*there, wait.waiter})

    def farewell(self, rank: int, text: str) -> None:
        """Lets the others know why a rank ends, before its connections break."""
        within(_STORE_LIMIT_S, partial(self._store.set, _farewell(rank), text))

    def farewells(self, ranks: Sequence[int]) -> dict[int, str]:
        """Why ranks have ended, of those that said so."""

        def read() -> dict[int, str]:
            known = [rank for rank in ranks if self._store.check([_farewell(rank)])]
            return {rank: self._store.get(_farewell(rank)).decode() for rank in known}

        return within(_STORE_LIMIT_S, read) or {}

    def answers(self) -> bool:
        """Whether the store can be reached; a connection that is broken tells that at once."""
        return within(_ANSWER_S, partial(self._store.check, ["sparsepipe/any"])) is not None

    def _set(self, rank: int, text: str) -> None:
        within(_STORE_LIMIT_S, partial(self._store.set, _key(rank), text))

    def _read(self, rank: int) -> Wait | None:
        def read() -> str:
            return self._store.get(_key(rank)).decode() if self._store.check([_key(rank)]) else ""

        if not (text := within(_STORE_LIMIT_S, read)):
            return None
        word = json.loads(text)
        return Wait(**{**word, "among": tuple(word["among"])})


def timeout_message(
    late: WaitTimedOut, *, rank: int, limit_s: float, name: Callable[[int], str]
) -> str:
    """What a rank says that gave up: who is waited for, by whom, and for what.

    Args:
        late: where the wait led to.
        rank: that gave up.
        limit_s: how long it has waited.
        name: how ranks are called.
    """
    wait = late.chain[-1]
    who, waiter = " and ".join(map(name, late.missed)), name(wait.waiter)
    if not wait.message:
        text = f"{who} did not take part in {wait.what} with {waiter}"
    elif wait.sending:
        text = f"{who} took nothing from {waiter}, so {wait.what} could not be sent"
    else:
        text = f"{who} did not send {wait.what} to {waiter}"
    if wait.waiter == rank:
        return f"{text} within {limit_s:g} s"
    return f"{text}; {name(rank)} has waited for that for {limit_s:g} s"


def within(limit_s: float, function: Callable[[], _Value]) -> _Value | None:
    """What ``function`` returns, None if that takes too long or fails."""
    found: list[_Value] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception:
            return  # the store is gone: then nothing is known

    thread = threading.Thread(target=run, name="waits", daemon=True)
    thread.start()
    for _ in range(_LOOKS):
        thread.join(limit_s / _LOOKS)
        if not thread.is_alive():
            break
    return found[0] if found else None


def _together(word: Wait, wait: Wait) -> bool:
    return (word.message, word.among, word.what) == (wait.message, wait.among, wait.what)


def _key(rank: int) -> str:
    return f"sparsepipe/waits/{rank}"


def _farewell(rank: int) -> str:
    return f"sparsepipe/farewells/{rank}"


_ROLL_CALL_S = 2.0
"""How long a rank that has met in late waits for the others to say the same."""
UNREACHED = (
    "see whether that rank has started, and whether the hosts reach each other "
    f"(GLOO_SOCKET_IFNAME names the interface); then {AGAIN}"
)
_LOOK_S = 0.1

_names: list[Callable[[int], str]] = []


def set_rank_names(name: Callable[[int], str]) -> None:
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
        if not is_backend_error(type(error).__name__, str(error)):
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
        late = board.in_vain(wait)
        text = timeout_message(late, rank=wait.waiter, limit_s=limit_s, name=name_of)
        return blaming(late.missed, text, remedy=LATE)
    who = " or ".join(map(name_of, absent)) or "a rank"
    return blaming(absent, f"{who} is gone: its connection to {me} broke {during}", remedy=GONE)


def _timed_out(error: RuntimeError) -> bool:
    """Whether a limit was reached: gloo's words, or those of the store by which it connects."""
    text = str(error).lower()
    return "timed out" in text or "wait timeout" in text


def _roll_call(board: WaitBoard, wait: Wait) -> tuple[tuple[int, ...], dict[int, str]]:
    """Who does not say that it has met in late too, and what those said who have ended."""
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


_ASKING_S = 2.0


class Roll:
    """Which ranks have come to join.

    Args:
        rank: this one.
        count: of all ranks.
        keeper: the rank whose process keeps the store; None: the launcher does.
        limit_s: of the joining.
    """

    def __init__(self, rank: int, *, count: int, keeper: int | None, limit_s: float) -> None:
        self._rank = rank
        self._count = count
        self._keeper = keeper
        self._limit_s = limit_s
        self._store: Any = None

    def sign(self, store: Any) -> None:
        """Tells the others that this rank has come; ``store`` is of this joining alone."""
        self._store = store
        store.set(_came_key(self._rank), "1")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around all of the joining; errors of the backend become the house's.

        Raises:
            TransportError: not all ranks came within the limit, or one was lost again.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_backend_error(type(error).__name__, str(error)):
                raise
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> TransportError:
        me, within_limit = name_of(self._rank), f"within {self._limit_s:g} s"
        if self._store is None and self._keeper == self._rank:
            return blaming((), f"{_came(error, self._count)} {within_limit}", remedy=UNREACHED)
        absent = None if self._store is None else within(_ASKING_S, self._absent)
        if absent is None:
            if self._keeper is None:
                text = f"{me} does not reach the launcher, at which all ranks join"
                return blaming(self._rank, text, remedy=UNREACHED)
            text = f"{name_of(self._keeper)}, at which all ranks join, does not answer {me}"
            return blaming(self._keeper, text, remedy=UNREACHED)
        if not absent:
            said = str(error).partition("\n")[0]
            text = f"all ranks came to join, but {me} could not connect to all others: {said}"
            return blaming((), text, remedy=UNREACHED)
        who = " and ".join(map(name_of, absent))
        return blaming(absent, f"{who} did not come to join {me} {within_limit}", remedy=UNREACHED)

    def _absent(self) -> list[int]:
        return [rank for rank in range(self._count) if not self._store.check([_came_key(rank)])]


def _came_key(rank: int) -> str:
    return f"sparsepipe/came/{rank}"


def _came(error: RuntimeError, count: int) -> str:
    """How many came to the store's own rank, which counts them and does not know them."""
    found = re.search(r"(\d+)/\d+ clients joined", str(error))
    if found is None:
        return f"not all of {count} ranks came to join"
    return f"{found[1]} of {count} ranks came to join"
