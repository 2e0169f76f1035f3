"""Stops in the middle of an epoch: all ranks after the same step, without waiting each step.

Ranks of a pipeline are never more than some steps apart. One that wants to stop names a
step that no rank can have reached yet, in the store that all ranks share, and rings a bell
there; each listens after every step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.missing_ranks import (
    GONE,
    LATE,
    blaming,
    limit_s,
    name_of,
)

_Value = TypeVar("_Value")
_BELL = "sparsepipe/stop/bell"
_desks: list[Desk] = []  # at most one, of the group that this process has joined last


class Desk:
    """Asks the store at which the ranks met, from a thread: the store itself knows no limit.

    Args:
        store: may be on a rank that stands still.
        limit_s: of every question.
    """

    def __init__(self, store: Any, *, limit_s: float) -> None:
        self.store = store
        self.numbers = itertools.count()  # of the agreements
        self._limit_s = limit_s
        self._questions: SimpleQueue[tuple[Callable[[Any], Any], SimpleQueue[Any]]] = SimpleQueue()
        self._step: int | None = None
        self._rings = 0
        threading.Thread(target=self._serve, name="stops", daemon=True).start()

    def ask(self, question: Callable[[Any], _Value]) -> _Value:
        """What the store answers.

        Raises:
            TransportError: nothing within the limit, or the store is gone.
        """
        answers: SimpleQueue[_Value | Exception] = SimpleQueue()
        self._questions.put((question, answers))
        try:
            answer = answers.get(timeout=self._limit_s)
        except Empty:
            raise self._failed(f"did not answer within {self._limit_s:g} s", LATE) from None
        if isinstance(answer, Exception):
            raise self._failed("is gone", GONE) from answer
        return answer

    def rings(self, step: int) -> int:
        """How often somebody has wished for a stop; asked once a step, whoever wants to know."""
        if step != self._step:
            self._rings = self.ask(lambda store: int(store.add(_BELL, 0)))
            self._step = step
        return self._rings

    def _serve(self) -> None:
        while True:
            question, answers = self._questions.get()
            try:
                answers.put(question(self.store))
            except Exception as error:
                answers.put(error)

    def _failed(self, how: str, remedy: str) -> Exception:
        host, me = process_group.store_rank(), process_group.rank()
        if host is None:  # the launcher outlives all ranks
            text = f"{name_of(me)} is cut off from the launcher, which {how}"
            return blaming(me, text, remedy=remedy)
        text = f"{name_of(host)} {how}, asked by {name_of(me)} whether to stop"
        return blaming(host, text, remedy=remedy)


class StopAgreement:
    """Agrees on a step to stop after. Every rank must make as many of these, in one order.

    Args:
        spread: steps that ranks can be apart at most.
        desk: asks where all ranks can; by default the group's.
    """

    def __init__(self, *, spread: int, desk: Desk | None = None) -> None:
        self._spread = spread
        self._desk = _common_desk() if desk is None else desk
        self._key = "" if self._desk is None else f"sparsepipe/stop/{next(self._desk.numbers)}"
        self._agreed: int | None = None
        self._heard = 0

    @property
    def pending(self) -> bool:
        """Whether this rank knows of a step that has been agreed on."""
        return self._agreed is not None

    def reached(self, step: int, *, asked: bool) -> bool:
        """Whether to stop after ``step``; each rank asks after each of its steps.

        Args:
            step: number of the step just done.
            asked: this rank wants to stop as soon as it can be.

        Raises:
            TransportError: the store does not answer.
        """
        desk = self._desk
        if desk is None:
            return asked
        if self._agreed is None and asked:
            wish = str(step + 2 * self._spread + 2)  # twice: the others look after a step
            self._agreed = desk.ask(lambda store: int(store.compare_set(self._key, "", wish)))
            desk.ask(lambda store: store.add(_BELL, 1))
        elif self._agreed is None and (rings := desk.rings(step)) != self._heard:
            self._heard = rings
            self._agreed = desk.ask(self._read)
        return self._agreed is not None and step >= self._agreed

    def _read(self, store: Any) -> int | None:
        return int(store.get(self._key)) if store.check([self._key]) else None


def _common_desk() -> Desk | None:
    if process_group.world_size() == 1:
        return None
    store = process_group.store()
    if not _desks or _desks[0].store is not store:
        _desks[:] = [Desk(store, limit_s=limit_s())]
    return _desks[0]
