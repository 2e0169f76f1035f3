"""``max_time`` stops all ranks after the same step, and they do not wait each step for it."""

from __future__ import annotations

import time

from pipeline_cases import make_loader, make_net, pipeline_trainer
from processes import run


def timed(rank: int) -> tuple[int, int, float]:
    """Steps, broadcasts and seconds."""
    trainer = pipeline_trainer("1-1", [3], max_epochs=1, max_time={"seconds": 1})
    broadcast, calls = trainer.strategy.broadcast, []

    def counting(*args: object) -> object:
        calls.append(args)
        return broadcast(*args)  # type: ignore[arg-type]

    trainer.strategy.broadcast = counting  # type: ignore[assignment, method-assign]
    loader = make_loader("dense", batches=6000)
    begin_s = time.monotonic()
    trainer.fit(make_net("dense"), loader)
    assert not any("on_train_batch_end" in vars(c) for c in trainer.callbacks)  # type: ignore[attr-defined]
    return trainer.global_step, len(calls), time.monotonic() - begin_s


def test_time_ends_all_ranks_at_one_step() -> None:
    (steps, broadcasts, seconds), second = run(timed, 2)
    assert steps == second[0]
    assert 20 < steps < 6000
    assert 1 <= seconds < 20
    assert broadcasts < 15
