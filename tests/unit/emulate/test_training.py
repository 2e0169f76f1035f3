"""Updates of replay layers: how long they take, whoever makes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.emulate.training import ReplayData, ReplayModule, rates
from sparsepipe.errors import ConfigError
from sparsepipe.profiling import Profile
from sparsepipe.strategies import PipelineStrategy
from sparsepipe.strategies.sharding import ShardedOptimizer
from tests.support.replay_cases import UPDATES_S, Noted, plain_trainer, profile

MOMENTA = (0.0, 0.9)  # without, no numbers are updated; with, those of SpecTrain


def taken_by_update(
    measured: Profile, *, momentum: float, owned: range | None = None, **asked: bool
) -> list[float]:
    """The pauses of one update, by the layers of a stage; None: by all."""
    noted = Noted()
    module = ReplayModule(measured, noted.pace(), momentum=momentum, **asked)
    optimizer = module.configure_optimizers()
    if owned is not None:
        mine = [p for index in owned for p in module.layers[index].parameters()]
        ShardedOptimizer(optimizer, owned={id(parameter) for parameter in mine})
    assert optimizer.step(lambda: 7.0) == 7.0
    return noted.taken


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize(
    ("owned", "taken"),
    [
        *((range(2), [1.0]), (range(2, 4), [0.375]), (range(3, 4), [0.25]), (range(1, 2), [])),
        (None, [sum(UPDATES_S)]),
    ],
)
def test_a_stage_takes_the_time_of_updates_of_its_own_layers(
    momentum: float, owned: range | None, taken: list[float]
) -> None:
    assert taken_by_update(profile(updates=True), momentum=momentum, owned=owned) == taken


def test_updates_missing_in_the_profile_take_no_time() -> None:
    measured = profile(updates=True)
    partly = replace(
        measured, layers=(replace(measured.layers[0], update_s=None), *measured.layers[1:])
    )
    for untold in (profile(), partly):
        assert taken_by_update(untold, momentum=0.0) == []
    assert taken_by_update(measured, momentum=0.0, updates=False) == [], "another device's is not"


@pytest.mark.parametrize("momentum", MOMENTA)
def test_a_plain_trainer_takes_it_in_every_step(momentum: float, tmp_path: Path) -> None:
    noted, measured = Noted(), profile(updates=True, input_bytes=36)
    module = ReplayModule(measured, noted.pace(), momentum=momentum)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, datamodule=ReplayData(measured, minibatches=3))
    step = [0.1, 0.2, 0.05, 0.06, 0.5, 0.3, sum(UPDATES_S)]  # forward, backward, update
    assert noted.taken == 3 * step


class WorksBefore(pl.Callback):
    """Takes time right before the update, when its gradients are there."""

    def __init__(self, noted: Noted) -> None:
        self._noted = noted

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._noted.work(7.0)


def predicting() -> PipelineStrategy:
    """One stage, which the pipeline's worker runs: only draws that are keyed need it."""
    return PipelineStrategy(config="1", cuts=[], mode="spectrain", keyed_randomness=True)


@pytest.mark.parametrize(
    ("strategy", "momentum", "worked_s", "pauses"),
    [
        (None, 0.0, 0.5, [1.375]),
        (None, 0.9, 0.5, [0.875]),
        (None, 0.9, 1.375, []),
        (None, 0.9, 2.0, []),
        (predicting, 0.9, 0.5, [0.875]),
    ],
)
def test_what_an_update_computes_is_part_of_its_time(
    strategy: Callable[[], PipelineStrategy] | None,
    momentum: float,
    worked_s: float,
    pauses: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted, measured = Noted(), profile(updates=True, input_bytes=36)
    arithmetic = sys.modules[torch.optim.SGD.__module__]
    sgd = arithmetic.sgd

    def slow(*args: Any, **kwargs: Any) -> None:
        noted.work(worked_s)
        sgd(*args, **kwargs)

    monkeypatch.setattr(arithmetic, "sgd", slow)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    module = ReplayModule(measured, noted.pace(), momentum=momentum)
    trainer = plain_trainer(
        tmp_path, WorksBefore(noted), strategy="auto" if strategy is None else strategy()
    )
    trainer.fit(module, datamodule=ReplayData(measured, minibatches=3))
    layers = [0.1, 0.2, 0.05, 0.06, 0.5, 0.3]
    assert noted.taken == 3 * [*layers, *pauses], "only what follows all else counts"


# Ten steps of 2 s each, but the first four, which fill, and the last, which drains.
ENDS_S = [100.5, 101, 101.5, 102, 104, 106, 108, 110, 112, 120]


def test_the_steady_part_neither_fills_nor_drains() -> None:
    found = rates(ENDS_S, begin_s=100, per_step=1, time_scale=1, ahead=3)
    assert found.steady_per_s == 0.5
    assert found.steady_steps == 3
    assert found.epoch_per_s == 0.5
    assert found.epoch_s == 20
    assert found.minibatches == 10


@pytest.mark.parametrize(("steps", "ahead"), [(1, 0), (4, 0), (10, 7)])
def test_too_few_steps_are_refused(steps: int, ahead: int) -> None:
    with pytest.raises(ConfigError, match=f"steps={steps} is too short") as caught:
        rates(ENDS_S[:steps], begin_s=100, per_step=1, time_scale=1, ahead=ahead)
    least = int(caught.value.remedy.split(" to ")[1].split()[0])
    enough = [float(k) for k in range(least)]
    assert rates(enough, begin_s=-1, per_step=1, time_scale=1, ahead=ahead).steady_steps >= 1
