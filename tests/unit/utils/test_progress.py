"""What work says of itself while nothing else is logged."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.sources import GeneratedShapes
from sparsepipe.runs import logs
from sparsepipe.utils import progress as module
from sparsepipe.utils.progress import Count, Silence, progress


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_every_30_seconds_and_never_more_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparsepipe")
    clock = Clock()
    silence = Silence(clock=clock)
    spoken_s = []
    for clock.now_s in range(200):
        before = len(caplog.messages)
        silence.break_if_due(lambda: "still at it")
        spoken_s += [clock.now_s] * (len(caplog.messages) - before)
        if clock.now_s == 100:  # a line of somebody else's
            silence.broken()
    assert spoken_s == [30, 60, 90, 130, 160, 190]


def test_what_is_done_and_left() -> None:
    clock = Clock()
    count = Count("reading files", 40, clock=clock)
    assert str(count) == "reading files"
    clock.now_s = 31
    assert str(count) == "reading files: 0 of 40 after 31 s"
    count.reached()
    assert str(count) == "reading files: 1 of 40 after 31 s, about 20 min left"
    clock.now_s = 310
    for _ in range(9):
        count.reached()
    assert str(count) == "reading files: 10 of 40 after 5 min, about 16 min left"


def test_what_was_done_before_counts_as_done_but_not_for_the_pace() -> None:
    clock = Clock()
    count = Count("epoch 3/9, batches", 1000, clock=clock)
    for clock.now_s, done in ((10, 901), (20, 902)):
        count.reached(done)
    assert str(count) == "epoch 3/9, batches: 902 of 1,000 after 20 s, about 16 min left"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> Silence:
    """A silence of 50 ms in the place of this process's."""
    silence = Silence(longest_s=0.05)
    monkeypatch.setattr(module, "SILENCE", silence)
    monkeypatch.setattr(logs, "SILENCE", silence)
    return silence


def test_one_thing_that_takes_long_is_reported_too(
    brief: Silence, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a terminal, by lines alone: no bar is drawn."""
    caplog.set_level(logging.INFO, "sparsepipe")
    with progress("modelling") as advance:
        advance(2)
        threading.Event().wait(0.4)
    after = len(caplog.messages)
    assert 3 <= after <= 8
    assert "modelling: 1 of 2 after 0 s, about 0 s left" in caplog.messages
    threading.Event().wait(0.2)
    assert len(caplog.messages) == after
    assert capsys.readouterr().err == ""


def test_lines_of_the_log_end_a_silence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    silence = Silence(clock=clock)
    monkeypatch.setattr(logs, "SILENCE", silence)
    package = logging.getLogger("sparsepipe")
    before = (package.handlers[:], package.level, package.propagate)
    try:
        logs.configure()
        clock.now_s = 29
        logging.getLogger("sparsepipe.launch").info("epoch 1/4")
    finally:
        package.handlers[:], level, package.propagate = before
        package.setLevel(level)
    assert "epoch 1/4" in capsys.readouterr().err
    assert silence.break_if_due(lambda: "not due") == 30


def test_shapes_that_are_modelled_and_sampled(
    brief: Silence, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparsepipe")
    source = GeneratedShapes(
        tmp_path / "shapes", classes=["mug", "gear"], train_per_class=40, test_per_class=1
    )
    source.load("train", CacheSettings(directory=tmp_path / "cache", workers=1))
    kinds = {line.partition(":")[0] for line in caplog.messages}
    assert {"modelling shapes", "preparing points"} <= kinds
