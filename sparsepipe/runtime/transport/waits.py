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
from typing import Any, TypeVar

from sparsepipe.runtime.transport.message import Kind

_Value = TypeVar("_Value")
_STORE_LIMIT_S = 1.0


class WaitedInVain(Exception):
    """A wait has reached its limit.

    Args:
        chain: this wait, then that of the rank it is for, and so on to a rank that does not
            wait, as far as is known.
    """

    def __init__(self, chain: Sequence[Wait]) -> None:
        super().__init__(chain)
        self.chain = chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a rank waits for.

    Attributes:
        waiter: the rank.
        peer: whom it waits for.
        kind: of the message, as :class:`Kind` names it.
        minibatch: of the message.
        sending: it waits for room to send it, not for it to come.
    """

    waiter: int
    peer: int
    kind: str
    minibatch: int
    sending: bool = False

    @classmethod
    def of(cls, waiter: int, peer: int, kind: Kind, minibatch: int, *, sending: bool) -> Wait:
        """The wait of ``waiter`` for a message of ``kind``."""
        return cls(waiter=waiter, peer=peer, kind=kind.value, minibatch=minibatch, sending=sending)


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
            self._say(wait, json.dumps(asdict(wait)))
        try:
            value = take(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            raise WaitedInVain(self._chain(wait)) from None
        self._say(wait, "")
        return value

    def _say(self, wait: Wait, text: str) -> None:
        _within(_STORE_LIMIT_S, partial(self._store.set, _key(wait.waiter), text))

    def _chain(self, wait: Wait) -> list[Wait]:
        chain = [wait]
        while following := _within(_STORE_LIMIT_S, partial(self._read, chain[-1].peer)):
            if following.waiter in {link.waiter for link in chain}:
                break  # a circle, in which nobody is more at fault than another
            chain.append(following)
        return chain

    def _read(self, rank: int) -> Wait | None:
        if not self._store.check([_key(rank)]):
            return None
        text = self._store.get(_key(rank)).decode()
        return Wait(**json.loads(text)) if text else None


def _key(rank: int) -> str:
    return f"sparsepipe/waits/{rank}"


def _within(limit_s: float, function: Callable[[], _Value]) -> _Value | None:
    """What ``function`` returns, None if that takes too long or fails."""
    found: list[_Value] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception:
            return  # the store is gone: then nothing is known

    thread = threading.Thread(target=run, name="waits", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None
