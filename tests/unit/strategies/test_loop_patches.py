"""A stop or time limit that one rank notices stops all ranks after the same step."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.tuner import Tuner
from torch import Tensor

from tests.support.pipeline_cases import (
    Net,
    dense_layers,
    make_loader,
    make_net,
    pipeline_trainer,
    plain_trainer,
    weights,
)
from tests.support.processes import run, run_shared

BATCHES = 16


class Wishes(Net):
    """Sets ``trainer.should_stop`` in one of its hooks, on one rank."""

    def __init__(self, place: str, rank: int) -> None:
        torch.manual_seed(11)
        super().__init__(dense_layers())
        self._place, self._rank, self._validations = place, rank, 0

    def here(self, place: str, *, epoch: int = 0) -> None:
        if (place, self._rank) == (self._place, self.trainer.global_rank):
            self.trainer.should_stop |= self.trainer.current_epoch == epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:  # only where there is a loss: on the last stage
            self.here("training_step")
        return loss

    def on_train_start(self) -> None:
        self.here("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.here("on_train_batch_start")

    def on_validation_end(self) -> None:  # after those of the callbacks
        if not self.trainer.sanity_checking:
            self._validations += 1
            self.here("on_validation_end", epoch=1)


def stopping(rank: int, config: str | None, *cases: tuple[str, int]) -> list[Any]:
    """Fits for each place where one rank wishes to stop, one after the other."""
    found = []
    for place, asks in cases:
        net = Wishes(place, asks)
        options: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 1}
        trainer = (
            plain_trainer(**options) if config is None else pipeline_trainer(config, [3], **options)
        )
        trainer.fit(net, make_loader("dense", batches=BATCHES), make_loader("dense", batches=2))
        counts = trainer.global_step, trainer.current_epoch, net._validations
        found.append((counts, weights(net)))
    return found


def test_a_stop_wished_for_within_a_step() -> None:
    """All ranks come to it some steps later, and validate then, as one device does."""
    cases = ("training_step", 1), ("on_train_batch_start", 0)
    for (first, state), (second, other) in zip(*run(stopping, 2, "1-1", *cases), strict=True):
        assert first == second
        steps, epoch, validations = first
        assert 3 < steps < BATCHES
        assert (epoch, validations) == (1, 1)
        assert all(torch.equal(value, other[name]) for name, value in state.items())


BETWEEN = {
    "on_train_start": 0,
    "on_validation_end": 2 * BATCHES,
}


@pytest.mark.parametrize("asks", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_stop_wished_for_between_steps_is_one_devices(asks: int) -> None:
    (alone,) = run(stopping, 1, None, *((place, 0) for place in BETWEEN))
    assert [counts[0] for counts, _ in alone] == [*BETWEEN.values()]
    for found in run(stopping, 2, "1-1", *((place, asks) for place in BETWEEN)):
        assert [counts for counts, _ in found] == [counts for counts, _ in alone]


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


class Rate(Net):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(dense_layers())
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def searching(rank: int) -> Any:
    net = Rate()
    before = weights(net)
    trainer = pipeline_trainer("2-1", [3], max_epochs=2)
    found = Tuner(trainer).lr_find(
        net, make_loader("dense", batches=8), num_training=30, max_lr=1e3,
        early_stop_threshold=3.0, update_attr=False,
    )  # fmt: skip
    assert found is not None
    assert all(torch.equal(value, before[name]) for name, value in weights(net).items())
    trainer.fit(net, make_loader("dense", batches=8))
    return found.results, trainer.global_step, weights(net.layers)


def test_a_search_for_a_rate_by_replicas_ends_for_all_and_the_training_goes_on() -> None:
    first, *others = run_shared(searching, 3)
    assert 2 < len(first[0]["loss"]) < 30
    assert min(first[0]["loss"]) > 0.1  # no step is reported before it has come back
    assert first[1] == 8
    for results, steps, layers in others:
        assert (results, steps) == (first[0], 8)
        assert all(torch.equal(value, first[2][name]) for name, value in layers.items())
