"""Agreement of all ranks on a stop in the middle of an epoch, after the same step.

The number of steps that ranks are apart is limited. A rank that wants to stop proposes a step that
no rank can have reached yet, in the store that all ranks share, and increments a count of proposals
there; each rank reads that count after every step, so that no step waits for other ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sparsepipe.errors import TransportError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.missing_ranks import (
    REMEDY_GONE,
    REMEDY_LATE,
    group_limit_s,
    rank_name,
)

_Value = TypeVar("_Value")
_PROPOSALS = "sparsepipe/stop/proposals"
_clients: list[StoreClient] = []  # at most one, for the group that this process joined last


class StoreClient:
    """Sends requests to the ranks' store, each with a time limit, which the store itself lacks."""

    def __init__(self, store: Any, *, limit_s: float) -> None:
        self.store = store
        self.numbers = itertools.count()  # numbers of the agreements
        self._limit_s = limit_s
        self._requests: SimpleQueue[tuple[Callable[[Any], Any], SimpleQueue[Any]]] = SimpleQueue()
        self.step: int | None = None  # step of the last count of proposals, for all agreements
        self.proposals = 0

        def serve() -> None:
            while True:
                function, answers = self._requests.get()
                try:
                    answers.put(function(self.store))
                except Exception as error:
                    answers.put(error)

        threading.Thread(target=serve, name="store-client", daemon=True).start()

    def request(self, function: Callable[[Any], _Value]) -> _Value:
        """Returns ``function(store)``; raises a TransportError if it fails or exceeds the limit."""
        answers: SimpleQueue[_Value | Exception] = SimpleQueue()
        self._requests.put((function, answers))
        try:
            answer = answers.get(timeout=self._limit_s)
        except Empty:
            answer = TimeoutError()
        if not isinstance(answer, Exception):
            return answer
        how, remedy = "is gone", REMEDY_GONE
        if isinstance(answer, TimeoutError):
            how, remedy = f"did not answer within {self._limit_s:g} s", REMEDY_LATE
        host, me = process_group.store_rank(), rank_name(process_group.rank())
        message = f"{me} is cut off from the launcher, which {how}"  # it outlives all ranks
        if host is not None:
            message = f"{rank_name(host)} {how} when {me} checked whether to stop"
        error = TransportError(message, remedy=remedy)
        error.ranks = () if host is None else (host,)
        raise error from answer


class StopAgreement:
    """Agrees with all ranks on a step to stop after. All ranks create agreements in the same order.

    Args:
        spread: largest number of steps that ranks can be apart.
        client: sends requests to the ranks' store; None: one per process, unless it is alone.

    Attributes:
        agreed: number of the step to stop after; None: this rank knows of none, or is alone.
        reason: the ``reason`` of the rank that proposed that step; 0 until it is known.
    """

    def __init__(self, *, spread: int, client: StoreClient | None = None) -> None:
        self._spread = spread
        if client is None and process_group.world_size() > 1:
            store = process_group.store()
            if not _clients or _clients[0].store is not store:
                _clients[:] = [StoreClient(store, limit_s=group_limit_s())]
            client = _clients[0]
        self._client = client
        number = "" if self._client is None else next(self._client.numbers)
        self._key = f"sparsepipe/stop/{number}"
        self.agreed: int | None = None
        self.reason = 0
        self._proposals = 0

    def reached(self, step: int, *, requested: bool, reason: int = 0) -> bool:
        """Whether to stop after ``step``; to be called by each rank after each of its steps.

        ``requested``: whether this rank wants to stop; ``reason``: why, as a number for all.
        """
        client, key = self._client, self._key
        if client is None:
            self.reason = reason
            return requested
        found: bytes | None = None
        if self.agreed is None and requested:
            last = step + 2 * self._spread + 2  # twice the spread: others look only after a step
            proposal = f"{last} {reason}"
            found = client.request(lambda store: store.compare_set(key, "", proposal))
            client.request(lambda store: store.add(_PROPOSALS, 1))
        elif self.agreed is None:
            if step != client.step:
                client.proposals = client.request(lambda store: int(store.add(_PROPOSALS, 0)))
                client.step = step
            if client.proposals != self._proposals:
                self._proposals = client.proposals
                found = client.request(lambda store: store.get(key) if store.check([key]) else None)
        if found is not None:
            self.agreed, self.reason = map(int, found.split())
        return self.agreed is not None and step >= self.agreed
