"""Who waits for whom: so that the rank that is named is the one that holds all up.

When a rank stands still, its peers wait for it, their peers for them, and whoever began
first gives up first. Therefore ranks that have waited for half their limit say so on the
store at which they met, and one that gives up follows these words to the end. Waits that
are met in time, which is all of them in a good run, cost nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sparsepipe.runtime.transport.message import Kind

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


class WaitedInVain(Exception):
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

    @classmethod
    def of(cls, waiter: int, peer: int, kind: Kind, minibatch: str, *, sending: bool) -> Wait:
        """The wait of ``waiter`` for a message of ``kind``; ``minibatch``: as errors call it."""
        what = f"the {kind.value} of {minibatch}"
        return cls(waiter=waiter, among=(peer,), what=what, sending=sending)


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
            WaitedInVain: the limit is reached.
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

    def in_vain(self, wait: Wait) -> WaitedInVain:
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
        return WaitedInVain(chain, missed)

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


def late_text(vain: WaitedInVain, *, rank: int, limit_s: float, name: Callable[[int], str]) -> str:
    """What a rank says that gave up: who is waited for, by whom, and for what.

    Args:
        vain: where the wait led to.
        rank: that gave up.
        limit_s: how long it has waited.
        name: how ranks are called.
    """
    wait = vain.chain[-1]
    who, waiter = " and ".join(map(name, vain.missed)), name(wait.waiter)
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
