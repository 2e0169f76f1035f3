"""``max_time`` stops all ranks after the same step, and they do not wait each step for it."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Timer

from tests.support.pipeline_cases import make_loader, make_net, pipeline_trainer
from tests.support.processes import run

OVER = 100  # the step after which an hour is over, on any machine


class Ages(pl.Callback):
    """Lets rank 0's clock, which alone counts, go on by an hour; it is that of a resumed run."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_rank == 0 and trainer.global_step == OVER:
            (timer,) = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
            timer.load_state_dict({"time_elapsed": {"train": 3600.0}})


def timed(rank: int) -> tuple[int, int]:
    """Steps and broadcasts."""
    trainer = pipeline_trainer("1-1", [3], max_epochs=1, max_time={"hours": 1}, callbacks=[Ages()])
    broadcast, calls = trainer.strategy.broadcast, []

    def counting(*args: object) -> object:
        calls.append(args)
        return broadcast(*args)  # type: ignore[arg-type]

    trainer.strategy.broadcast = counting  # type: ignore[assignment, method-assign]
    trainer.fit(make_net("dense"), make_loader("dense", batches=3 * OVER))
    ours = [c for c in trainer.callbacks if not isinstance(c, Ages)]  # type: ignore[attr-defined]
    assert not any("on_train_batch_end" in vars(callback) for callback in ours)
    return trainer.global_step, len(calls)


def test_time_ends_all_ranks_at_one_step() -> None:
    (steps, broadcasts), second = run(timed, 2)
    assert steps == second[0]
    assert OVER < steps < 2 * OVER
    assert broadcasts < 15
