"""A trace by a clock of its own: what is recorded of a rank, and its times by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from sparsepipe.callbacks.trace import Measured
from sparsepipe.runtime.recording import Part, Recorder
from sparsepipe.schedule import Action, Span


class Rank:
    """A rank of two stages that works by a clock which only its work moves."""

    def __init__(self, *, skipped: int, count: int) -> None:
        self.now_s = self.on_core_s = 0.0
        self.recorder = Recorder(
            rank=0,
            skipped=skipped,
            count=count,
            clock=lambda: self.now_s,
            core_clock=lambda: self.on_core_s,
        )

    def passes(self, seconds: float, *, on_core: float = 1.0) -> None:
        self.now_s += seconds
        self.on_core_s += seconds * on_core

    @contextmanager
    def does(self, kind: str, number: int) -> Iterator[None]:
        with self.recorder.action(Action(kind, number)):  # type: ignore[arg-type]
            yield

    def computes(self, seconds: float, *, on_core: float = 1.0) -> None:
        with self.recorder.computing(nullcontext):
            self.passes(seconds, on_core=on_core)

    def beside(self, part: Part, seconds: float) -> None:
        with self.recorder.moment(part):
            self.passes(seconds)

    def step(self, number: int, *, hook_s: float = 1.0) -> None:
        mark = self.recorder.mark()
        self.passes(10.0)
        self.recorder.since(mark, "loads")
        self.recorder.begin(number)
        with self.does("F", number):
            self.computes(30.0)
            self.beside("sends", 2.0)
        if number:
            with self.does("B", number - 1):
                self.beside("waits", 4.0)
                self.computes(20.0, on_core=0.75)
                self.beside("logs", 1.0)
            with self.does("U", number - 1):
                self.beside("sums", 3.0)
                self.computes(5.0)
        mark = self.recorder.mark()
        self.beside("logs", hook_s / 2)  # within a hook: the hook it is
        self.passes(hook_s / 2)
        self.recorder.since(mark, "hooks")
        self.passes(7.0)


STEP_S = {
    **{"forwards": 30.0, "backwards": 20.0, "updates": 5.0, "loads": 10.0, "sends": 2.0},
    **{"waits": 4.0, "logs": 1.0, "sums": 3.0, "hooks": 1.0, "else": 7.0},
}


def measured(recorder: Recorder) -> Measured:
    recorder.trim()
    assert recorder.begin_s is not None
    assert recorder.end_s is not None
    return Measured(
        spans=recorder.spans,
        windows={0: (recorder.begin_s, recorder.end_s)},
        without_core_s={0: recorder.without_core_s or 0.0},
    )


@pytest.mark.parametrize("steps", [6, 9])
def test_all_of_a_steps_time_by_name(steps: int) -> None:
    """Whole steps of a full pipeline; forwards amid them of other minibatches count as well."""
    rank = Rank(skipped=2, count=3)
    for number in range(steps):
        rank.step(number)
    found = measured(rank.recorder)
    assert found.minibatches(0) == 3
    assert found.times_s(0) == pytest.approx(STEP_S)
    names = [str(span.action) for span in found.spans if span.is_action]
    assert names == ["F2", "B1", "U1", "F3", "B2", "U2", "F4", "B3", "U3", "F5", "B4", "U4"]
    words = found.in_words(0, {"forwards": 0.029, "loads": 0.0})
    assert words.startswith("83000.0 ms per minibatch: forwards 30000.0 (29.0 by the")
    assert words.endswith("; in 9% of its computing it had no core to itself")  # 5 of 55


def test_a_training_that_ends_amid_its_trace() -> None:
    """Without a forward after it the last action ends the time that counts."""
    rank = Rank(skipped=1, count=3)
    for number in range(3):
        rank.step(number)
    with rank.does("B", 2):
        rank.computes(20.0)
    rank.beside("saves", 50.0)
    found = measured(rank.recorder)
    assert [str(span.action) for span in found.spans if span.is_action][-1] == "B2"
    assert found.minibatches(0) == 2
    assert all(span.kind != "saves" for span in found.spans)
    whole_s = 2 * sum(found.times_s(0).values())
    assert whole_s == pytest.approx(2 * sum(STEP_S.values()) - 10.0 + 20.0)


def test_a_validation_within_a_trace_is_one_moment() -> None:
    rank = Rank(skipped=0, count=4)
    rank.step(0)
    mark = rank.recorder.mark()
    rank.computes(100.0)
    rank.beside("waits", 20.0)
    rank.recorder.since(mark, "validates")
    rank.step(1)
    kept = [span for span in rank.recorder.spans if span.end - span.start > 35]
    assert kept == [Span(0, "validates", start=mark.time_s, end=mark.time_s + 120.0)]


def test_nothing_of_other_minibatches_alone_is_kept() -> None:
    rank = Rank(skipped=5, count=2)
    for number in range(4):
        rank.step(number)
    rank.recorder.trim()
    assert not rank.recorder.spans
