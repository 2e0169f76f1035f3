"""A recorder of what one rank of a pipeline does, and when, during some of its minibatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sparsepipe.schedule import Action, Span

Part = Literal[
    "waits", "sends", "sums", "input", "loads", "moves", "hooks", "logs", "saves", "validates"
]
"""What a rank does besides its actions: it waits for a message, sends one, adds up gradients with
other replicas, prepares a microbatch's input ahead of its forward, loads a batch, moves it to the
device, runs hooks, logs values, saves a checkpoint, validates."""


class Mark(NamedTuple):
    """A point in time by a recorder's clock, and the number of spans recorded by then."""

    time_s: float
    spans: int


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Records what a rank does during ``count`` minibatches only, which bounds its memory.

    Recording begins with the first action of these minibatches and ends with their last one;
    actions of other minibatches in between are recorded as well. An action lasts from the beginning
    to the end of its computation: waits before it and messages after it are spans of their own,
    whose kind is a :data:`Part`.

    Args:
        rank: the recorded rank.
        skipped: number of minibatches, on all ranks together, that this process runs first.
        count: number of minibatches to record, on all ranks together.
        finish: waits for a GPU's kernels after a computation has returned; None: no GPU.
        clock: returns monotonic time in seconds.
        core_clock: returns the seconds that this thread has spent on a CPU core; None: unknown.

    Attributes:
        spans: actions and other activities, in the order of their ends.
        begin_s: when the rank reached the first action of these minibatches; None: not yet.
        end_s: when the rank reached the first action of a later minibatch; None: not yet.
        without_core_s: seconds of computation in between without a CPU core; None: unknown.
    """

    rank: int
    skipped: int
    count: int
    finish: Callable[[], None] | None = None
    clock: Callable[[], float] = time.monotonic
    core_clock: Callable[[], float] | None = None
    spans: list[Span] = field(default_factory=list)
    begin_s: float | None = None
    end_s: float | None = None
    without_core_s: float | None = None
    _first: int | None = None
    _records: bool = False
    _action: Action | None = None
    _computed: list[float] = field(default_factory=list)

    def begin(self, number: int) -> None:
        """Notes that minibatch ``number`` of the whole run enters; only the first call counts."""
        if self._first is None:
            self._first = number + self.skipped

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Context of an action, whose number is that of a minibatch in the whole run."""
        assert self._first is not None, "an action follows a minibatch's entry"
        number = action.number - self._first
        if self.begin_s is None and number >= 0:
            self.begin_s, self._records = self.clock(), True
        if number >= self.count:
            if self.end_s is None:
                self.end_s = self.clock()
            self._records = self._records and action.kind == "F"
        self._action, self._computed = action, []
        yield
        if self._records and self._computed:
            begin, end = self._computed[0], self._computed[-1]
            self.spans.append(Span.of(action, self.rank, begin, end))
        self._action = None

    def trim(self) -> None:
        """Drops what was recorded after the last action of the minibatches to record."""
        first, self._records = self._first, False
        if first is None:
            return
        actions = [n for n, span in enumerate(self.spans) if span.is_action]
        own = [n for n in actions if (self.spans[n].number or 0) - first < self.count]
        last, end_s = (own[-1], self.spans[own[-1]].end) if own else (-1, 0.0)
        self.end_s = end_s if self.end_s is None else self.end_s
        last_s = max(end_s, self.end_s)
        self.spans = [
            span
            for n, span in enumerate(self.spans)
            if (n <= last if span.is_action else span.start < last_s)
        ]

    @contextmanager
    def computing(self, inner: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Context of a computation (of an action or before one) within the context ``inner()``."""
        begin = self.clock()
        with inner():
            core_s = 0.0 if self.core_clock is None else self.core_clock()
            inside = self.clock()
            yield
            if self._records:
                if self.finish is not None:
                    self.finish()
                if self.core_clock is not None and self.end_s is None:
                    took_s, core_s = self.clock() - inside, self.core_clock() - core_s
                    self.without_core_s = (self.without_core_s or 0.0) + took_s - core_s
        if self._records and self._action is None:
            self.spans.append(Span(self.rank, "input", start=begin, end=self.clock()))
        elif self._records:
            self._computed += (begin, self.clock())

    @contextmanager
    def moment(self, part: Part) -> Iterator[None]:
        """Context of an activity other than an action, such as a wait."""
        begin, records = self.clock(), self._records
        yield
        if records:
            self.spans.append(Span(self.rank, part, start=begin, end=self.clock()))

    def mark(self) -> Mark:
        """Marks the present as the beginning of a span for :meth:`since`."""
        return Mark(self.clock(), len(self.spans))

    def since(self, mark: Mark, part: Part) -> None:
        """Records the time since ``mark`` as one span, which replaces those recorded since then.

        Does nothing if an action is under way or was recorded since then.
        """
        acts = self._action is not None or any(s.is_action for s in self.spans[mark.spans :])
        if self._records and not acts:
            del self.spans[mark.spans :]
            begin = max([mark.time_s, *(span.end for span in self.spans[-1:])])
            self.spans.append(Span(self.rank, part, start=begin, end=self.clock()))
