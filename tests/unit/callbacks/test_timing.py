"""How long stages wait and steps take, from times that are written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.callbacks.timing import (
    BusyTimes,
    Step,
    StepTimer,
    idle_shares,
    steady_idle,
    synchronous_bubbles,
)
from sparsepipe.errors import ConfigError
from sparsepipe.schedule import Plan, Schedule, gpipe, one_f_one_b
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.plans import plan_of
from tests.support.replay_cases import plain_trainer
from tests.support.timelines import timeline


def run_of(
    steps: int, *, begin_s: float, step_s: float, works_s: float, drains_s: float, first: int = 0
) -> list[Step]:
    """A rank's steps up to a drain, in each of which it first works and then waits.

    Args:
        steps: of the run.
        begin_s: of the first step.
        step_s: that each takes.
        works_s: of it.
        drains_s: that the last one takes longer, of which it works a second.
        first: steps that went before, since the pipeline was empty.
    """
    found = []
    for number in range(steps):
        at_s = begin_s + number * step_s
        drains = number == steps - 1
        busy = [(at_s, at_s + works_s)]
        if drains:
            busy.append((at_s + step_s, at_s + step_s + 1))
        found.append(Step(busy, at_s + step_s + drains_s * drains, first + number))
    return found


def two_epochs(works_s: float) -> list[Step]:
    """Six steps of 2 s, of which the last drains for 20; ten seconds later eight of 4 s."""
    return [
        *run_of(6, begin_s=0, step_s=2, works_s=works_s, drains_s=20),
        *run_of(8, begin_s=42, step_s=4, works_s=works_s, drains_s=20),
    ]


def test_steady_is_what_lies_between_filling_and_draining() -> None:
    """After the fourth of six steps, and the fifth of eight, until the last begins: 2 s and 8 s."""
    ranks = [two_epochs(1.5), two_epochs(0.5)]
    works_s = (1 * 1.5 + 2 * 1.5, 1 * 0.5 + 2 * 0.5)
    expected = [1 - each / (2 + 8) for each in works_s]
    assert steady_idle(ranks, ahead=1) == pytest.approx(expected)
    assert expected == pytest.approx([0.55, 0.85])


def test_epochs_that_are_all_filling_and_draining_are_never_steady() -> None:
    short = run_of(4, begin_s=0, step_s=2, works_s=1, drains_s=9)
    again = run_of(4, begin_s=30, step_s=2, works_s=1, drains_s=9)
    assert steady_idle([[*short, *again]] * 2, ahead=1) is None
    assert steady_idle([two_epochs(1.0)] * 2, ahead=5) is None
    long = run_of(6, begin_s=60, step_s=2, works_s=1, drains_s=9)
    assert steady_idle([[*short, *again, *long]] * 2, ahead=1) == pytest.approx([0.5, 0.5])


def test_unknown_times_of_other_ranks_do_not_count_as_waiting() -> None:
    steps: dict[str, Any] = {"step_s": 2, "drains_s": 4, "first": 100}
    first = run_of(12, begin_s=1000, works_s=1.5, **steps)
    other = run_of(12, begin_s=1004, works_s=1.0, **steps)
    assert steady_idle([first, other], ahead=2) == pytest.approx([1 / 4, 1 / 2])


def test_bubbles_are_those_of_minibatches_but_the_first_without_updates() -> None:
    """Two stages, one microbatch: forward 1 s, backward 2 s; the second time a message is late."""
    slow = Step([(0, 50), (60, 61), (61, 62)], 62, 0)
    first = [
        slow,
        Step([(100, 101), (104, 106), (106, 111)], 111, 1),
        Step([(200, 201), (206, 208), (208, 216)], 216, 2),
    ]
    last = [
        slow,
        Step([(101, 102), (102, 104), (104, 109)], 109, 1),
        Step([(201, 202), (202, 204), (204, 212)], 212, 2),
    ]
    expected = (3 / 6 + 5 / 8) / 2
    assert synchronous_bubbles([first, last]) == pytest.approx([expected] * 2)
    assert synchronous_bubbles([first[:2], last]) == pytest.approx([3 / 6, 3 / 6]), "of both"
    assert synchronous_bubbles([first[:1], last[:1]]) is None


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


STEPS, BETWEEN = 12, 6


def asynchronous() -> PipelineStrategy:
    """Keyed draws need the worker, with one rank too."""
    return PipelineStrategy(config="1", cuts=[], keyed_randomness=True)


def synchronous() -> SynchronousPipelineStrategy:
    return SynchronousPipelineStrategy(config="1", cuts=[], microbatches=2)


@pytest.mark.parametrize(
    ("strategy", "waits"),
    [
        # Forward, with what is before the layers, backward and update: three ticks of seven.
        (asynchronous, 4 / 7),
        # Forward and backward of two microbatches: four ticks of seven.
        (synchronous, 3 / 7),
    ],
)
def test_validations_do_not_count_as_time_of_a_training(
    strategy: Callable[[], Any], waits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that ticks when it is looked at: when a computation begins or ends, or a step."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    busy = BusyTimes(clock=count().__next__)
    trainer = plain_trainer(tmp_path, busy, strategy=strategy(), max_epochs=2,
                            val_check_interval=BETWEEN, num_sanity_val_steps=0)  # fmt: skip
    loader = DataLoader(torch.ones(STEPS * 4, 3), batch_size=4)
    trainer.fit(Net(), loader, DataLoader(torch.ones(20, 3), batch_size=4))
    assert trainer.global_step == 2 * STEPS
    assert busy.values() == pytest.approx({"bubble_share": waits, "bubble_share_of_busiest": waits})


BEGIN_S = 90.0
ENDS_S = [100.0 + k * k for k in range(10)]  # so that no two steps take as long


class Planned(PipelineStrategy):
    """A strategy that has its plan already, as in a Trainer that runs."""

    def __init__(self, *replicas: int) -> None:
        self.plan = plan_of("-".join(map(str, replicas)))


class PlannedWhole(SynchronousPipelineStrategy):
    __init__ = Planned.__init__  # type: ignore[assignment]


def trainer_of(strategy: object, *, ranks: int, steps: int = len(ENDS_S)) -> Any:
    """The trainer of a rank that is not the first: that one alone limits links."""
    return SimpleNamespace(
        strategy=strategy, world_size=ranks, num_training_batches=steps, is_global_zero=False
    )


def after_an_epoch(timer: StepTimer, trainer: Any) -> StepTimer:
    module: Any = None
    timer.on_train_start(trainer, module)
    timer.on_train_epoch_start(trainer, module)
    for step in range(trainer.num_training_batches):
        timer.on_train_batch_end(trainer, module, None, None, step)
    timer.on_train_end(trainer, module)
    return timer


@pytest.mark.parametrize(
    ("strategy", "ranks", "per_step", "steady", "steady_s"),
    [
        # Two replicas at the first stage, which goes 12 // 2 = 6 steps ahead of its backward.
        (Planned(2, 11), 13, 2, 1, 164 - 149),
        # A synchronous pipeline is not ahead of itself: from the end of step 5 to that of step 8.
        (PlannedWhole(2, 11), 13, 2, 3, 164 - 125),
        # A step of data parallelism is a minibatch of each rank.
        (object(), 3, 3, 3, 164 - 125),
    ],
    ids=["asynchronous", "synchronous", "dp"],
)
@pytest.mark.parametrize("time_scale", [1.0, 4.0, 0.5])
def test_rates_are_in_the_clusters_time(
    strategy: object, ranks: int, per_step: int, steady: int, steady_s: float, time_scale: float
) -> None:
    timer = StepTimer(time_scale, clock=iter([BEGIN_S, *ENDS_S]).__next__)
    found = after_an_epoch(timer, trainer_of(strategy, ranks=ranks)).rates()
    assert found.steady_steps == steady
    assert found.steady_per_s == pytest.approx(per_step * steady / (steady_s / time_scale))
    assert found.epoch_s == pytest.approx(91 / time_scale)
    assert found.epoch_per_s == pytest.approx(per_step * 10 / (91 / time_scale))
    assert found.minibatches == per_step * 10


def test_an_epoch_that_is_never_steady_is_refused_before_it_begins() -> None:
    timer = StepTimer(1.0, clock=iter(()).__next__)
    with pytest.raises(ConfigError, match="steps=9 is too short") as caught:
        after_an_epoch(timer, trainer_of(Planned(2, 11), ranks=13, steps=9))
    assert "limit_train_batches to 10 or more" in caught.value.remedy


def straight(stages: int) -> Plan:
    return Plan.of(config="-".join("1" * stages), cuts=range(1, stages), num_layers=stages)


def busy(schedule: Schedule, stages: list[float] | None = None) -> list[list[tuple[float, float]]]:
    """Forwards and backwards of each rank; the backward takes twice as long."""
    spans = timeline(schedule, update=5.0, stages=stages)
    return [
        [(span.start, span.end) for span in spans if span.rank == rank and span.kind != "U"]
        for rank in range(schedule.plan.num_ranks)
    ]


def test_two_stages_one_forward_one_backward_as_drawn() -> None:
    """By hand, with three microbatches: a forward takes 1, a backward 2.

    time     0  1  2  3  4  5  6  7  8  9 10 11 12
    stage 0  F0 F1 .  .  B0B0  F2 B1B1  .  B2B2     until 12
    stage 1  .  F0 B0B0  F1 B1B1  F2 B2B2           until 10
    """
    drawn = [
        [(0, 1), (1, 2), (4, 6), (6, 7), (7, 9), (10, 12)],
        [(1, 2), (2, 4), (4, 5), (5, 7), (7, 8), (8, 10)],
    ]
    assert busy(one_f_one_b(straight(2), 1, microbatches=3)) == drawn
    assert idle_shares(drawn) == pytest.approx([3 / 12, 3 / 12])


def test_unlike_stages_of_one_forward_one_backward() -> None:
    """The last stage takes twice as long: 2 x 6 of 15, and the first 2 x 3 of these."""
    found = idle_shares(busy(one_f_one_b(straight(2), 1, microbatches=2), [1.0, 2.0]))
    assert found == pytest.approx([9 / 15, 3 / 15])


def test_updates_and_what_waits_for_them_do_not_count() -> None:
    assert idle_shares([[(10, 11), (13, 15)], [(11, 13)]]) == pytest.approx([2 / 5, 3 / 5])


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 32])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_equal_stages_wait_as_the_formula_predicts(
    stages: int, microbatches: int, make: Callable[..., Schedule]
) -> None:
    """(K - 1)/(T + K - 1): GPipe, 2.3."""
    found = idle_shares(busy(make(straight(stages), 1, microbatches=microbatches)))
    assert found == pytest.approx([(stages - 1) / (microbatches + stages - 1)] * stages)


def test_what_lies_outside_of_the_time_does_not_count() -> None:
    ranks = [[(0.0, 4.0), (6.0, 9.0)], [(3.0, 5.0)], []]
    assert idle_shares(ranks, begin=2, end=7) == pytest.approx([2 / 5, 3 / 5, 1])
