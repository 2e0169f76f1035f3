"""What one rank of a pipeline really does, and when: a recorder for some of its minibatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from sparsepipe.schedule import Action, Span

Part = Literal["waits", "sends", "sums", "input"]
"""What a rank does beside its actions: waits for a message, hands one over, meets the other
replicas, or prepares a microbatch's input ahead of its forward."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of a rank's time beside its actions; seconds of :func:`time.monotonic`."""

    part: Part
    start: float
    end: float


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Records a rank's actions on a span of minibatches, so that its memory is bounded.

    An action lasts from the begin of what it computes to the end: waits before that, and messages
    after it, are moments of their own.

    Args:
        rank: whose.
        skipped: minibatches before those that are recorded, from the first that this process sees.
        count: minibatches that are recorded, over all ranks.
        finish: called where a computation has returned: waits for a GPU's kernels.
        clock: seconds that only grow.
    """

    rank: int
    skipped: int
    count: int
    finish: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    spans: list[Span] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    _first: int | None = None
    _records: bool = False
    _action: Action | None = None
    _computed: list[float] = field(default_factory=list)

    def begin(self, number: int) -> None:
        """A minibatch enters, by its number in the whole run."""
        if self._first is None:
            self._first = number + self.skipped

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Around an action, with a minibatch's number in the whole run."""
        assert self._first is not None, "an action follows a minibatch's entry"
        self._records = 0 <= action.number - self._first < self.count
        self._action, self._computed = action, []
        yield
        if self._records and self._computed:
            begin, end = self._computed[0], self._computed[-1]
            self.spans.append(Span(self.rank, action, begin, end))
        self._action = None

    @contextmanager
    def computing(self, inner: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Around a computation of the rank."""
        begin = self.clock()
        with inner():
            yield
            if self._records:
                self.finish()
        if not self._records:
            return
        if self._action is None:
            self.moments.append(Moment("input", begin, self.clock()))
        else:
            self._computed += (begin, self.clock())

    def moment(self, part: Part) -> AbstractContextManager[None]:
        """Around anything else that takes a rank's time."""
        return self._moment(part) if self._records else nullcontext()

    @contextmanager
    def _moment(self, part: Part) -> Iterator[None]:
        begin = self.clock()
        yield
        self.moments.append(Moment(part, begin, self.clock()))
