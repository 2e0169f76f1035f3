"""Distributed weights equal those of one process that replays the recorded versions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from exactness_cases import PLANS, Case, train
from pipeline_cases import BATCH, OPTIMIZERS, make_loader, make_net
from plans import plan_of
from processes import run
from replay import Replay, Seen
from torch.utils.data import DistributedSampler

from sparsepipe.schedule import asynchronous, peak_predicted, peak_stashed, peak_vertical

PEAKS = {
    "stash": peak_stashed,
    "vertical_sync": peak_vertical,
    "spectrain": peak_predicted,
    "none": lambda schedule, rank: 1,
}
RATE = 0.05


def schedule_version(case: Case, stage: int, minibatch: int) -> int:
    """Updates of a stage before a forward, from the semantics: w forwards ahead."""
    return max(0, minibatch // case.replicas[stage] - case.ahead(stage))


def steps_of_updates(case: Case, stage: int) -> list[int]:
    """The Lightning step in which the first replica of a stage comes to each update.

    Played through: every step brings a round of minibatches; the replica runs its forwards as
    they come, and an update with each once it has run those ahead. What is left waits for the
    drain, which is part of the last step.
    """
    steps: list[int] = []
    forwards = 0
    for minibatch in range(case.minibatches):
        if minibatch % case.replicas[stage] == 0:
            forwards += 1
            if forwards > case.ahead(stage):
                steps.append(minibatch // case.replicas[0])
    return steps + [case.steps - 1] * (forwards - len(steps))


def replayed(case: Case, segments: Sequence[Sequence[Any]]) -> tuple[Replay, list[float]]:
    """The oracle, and its losses of the last epoch, on what the ranks recorded."""
    net = make_net(case.net)
    oracle = Replay(
        net.layers,
        bounds=[0, *case.cuts, len(net.layers)],
        replicas=case.replicas,
        optimizer=OPTIMIZERS[case.optimizer],
    )
    losses: list[float] = []
    for epoch in range(case.epochs):
        losses = replay_epoch(case, oracle, epoch, [record[epoch] for record in segments])
    return oracle, losses


def replay_epoch(case: Case, oracle: Replay, epoch: int, records: Sequence[Any]) -> list[float]:
    forwards, backwards = recorded_versions(case, records)
    check_versions(case, forwards, backwards)
    # SpecTrain with predictions for the backward looks beyond a minibatch's own update: half as
    # many updates as there are ranks before the stage.
    beyond = [
        sum(case.replicas[:s]) // (2 * r) if case.predict_backward else 0
        for s, r in enumerate(case.replicas)
    ]

    def rate(step: int) -> float:
        """Of a Lightning step of this epoch."""
        halved = (epoch * case.steps + step) // case.step_size if case.step_size else 0
        return RATE * 0.5**halved

    def seen(versions: Mapping[tuple[int, int], int], stage: int, minibatch: int) -> Seen:
        version = versions[stage, minibatch]
        if case.mode != "spectrain":
            return Seen(version)
        ahead = minibatch // case.replicas[stage] - version + beyond[stage]
        # The prediction's rate is that of the step that brings the minibatch.
        return Seen(version, ahead=ahead, rate=rate(minibatch // case.replicas[0]))

    steps = [steps_of_updates(case, stage) for stage in range(len(case.replicas))]
    return oracle.segment(
        epoch_batches(case, epoch),
        partial(seen, forwards),
        backward=partial(seen, backwards) if sees_twice(case) else None,
        rate=(lambda stage, number: rate(steps[stage][number])) if case.step_size else None,
    )


def sees_twice(case: Case) -> bool:
    """Whether a minibatch's backward sees other weights than its forward."""
    return case.mode == "none" or case.predict_backward


def recorded_versions(
    case: Case, records: Sequence[Any]
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Updates before the weights of each forward and of each backward, by stage and minibatch."""
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], int] = {}
    ranks = [(s, i) for s, count in enumerate(case.replicas) for i in range(count)]
    schedule = asynchronous(plan_of(case.config), case.minibatches)
    for rank, ((stage, replica), record) in enumerate(zip(ranks, records, strict=True)):
        mine = range(replica, case.minibatches, case.replicas[stage])
        assert record.minibatches == case.minibatches
        assert sorted(record.version_of_forward) == sorted(record.version_of_backward) == [*mine]
        assert record.peak_versions == PEAKS[case.mode](schedule, rank)
        forwards |= {(stage, m): v for m, v in record.version_of_forward.items()}
        backwards |= {(stage, m): v for m, v in record.version_of_backward.items()}
    return forwards, backwards


def check_versions(
    case: Case, forwards: dict[tuple[int, int], int], backwards: dict[tuple[int, int], int]
) -> None:
    for (stage, minibatch), version in forwards.items():
        if case.mode == "vertical_sync":
            included = schedule_version(case, 0, minibatch) * case.replicas[0]
            assert version == included // case.replicas[stage]
        else:
            assert version == schedule_version(case, stage, minibatch)
    if not sees_twice(case):
        assert backwards == forwards
        return
    for (stage, minibatch), version in backwards.items():
        assert version == minibatch // case.replicas[stage], "the backward comes before its update"


def epoch_batches(case: Case, epoch: int) -> list[Any]:
    """Minibatches in their order; readers share them as Lightning deals samples out."""
    r0 = case.replicas[0]
    data = make_loader(case.net, batches=case.minibatches)
    if r0 == 1 or not case.lightning_deals:
        return list(data)
    shares = []
    for reader in range(r0):
        sampler = DistributedSampler(data.dataset, num_replicas=r0, rank=reader, seed=0)
        sampler.set_epoch(epoch)
        shares.append([data.dataset[i] for i in sampler])
    return [
        data.collate_fn(shares[m % r0][m // r0 * BATCH :][:BATCH]) for m in range(case.minibatches)
    ]


def check(case: Case, found: Sequence[Any]) -> None:
    oracle, losses = replayed(case, [segments for _, segments, _ in found])
    expected = oracle.state()
    mean = torch.tensor(0.0)
    for loss in losses:
        mean = mean + torch.tensor(loss) * BATCH
    mean = mean / (BATCH * len(losses))
    for state, _, logged in found:
        assert logged == found[0][2], "ranks differ"
        assert logged == float(mean)
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert torch.equal(value, found[0][0][name]), "ranks differ"
            assert torch.equal(value, expected[name]), f"{case}: {name}"


def check_all(cases: Sequence[Case]) -> None:
    """Trains cases of as many ranks in the same processes, one after the other."""
    ranks = sum(cases[0].replicas)
    everyone = run(train, ranks, cases, limit_s=60 + 20 * len(cases))
    for number, case in enumerate(cases):
        check(case, [found[number] for found in everyone])


COVERING = [
    Case("1-1"),
    Case("1-1", net="sparse", optimizer="adam"),
    Case("1-1", net="residual"),
    Case("1-1", mode="spectrain", minibatches=4),
    Case("1-1", optimizer="decay", step_size=3),
    Case("2-1", optimizer="decay", minibatches=9),  # the last round of stage 0 is partial
    Case("2-1", net="residual", minibatches=6),
    Case("2-1", mode="vertical_sync", minibatches=10),
    Case("2-1", mode="spectrain", predict_backward=True, minibatches=7),
    Case("1-2", optimizer="adam"),
    Case("1-2", step_size=2),
    Case("1-2", mode="vertical_sync"),
    Case("1-1-1", optimizer="adam", net="sparse"),
    Case("1-1-1", mode="vertical_sync"),
    Case("1-1-1", mode="spectrain", step_size=3),
    Case("1-1-1", mode="spectrain", predict_backward=True),
    Case("1-1-1", mode="none"),
    Case("1-2-1", net="sparse"),
    Case("2-1-1", minibatches=7, optimizer="decay", step_size=2),
    Case("2-1-1", minibatches=6, mode="none"),
    Case("1-3-1", minibatches=7),
    Case("1-3-1", mode="vertical_sync", minibatches=11),
    Case("2-3", optimizer="adam", minibatches=9),
    Case("2-3", mode="vertical_sync", optimizer="decay", minibatches=8),
    Case("1-3-1", net="sparse", optimizer="adam", minibatches=4),
]


def num_ranks(cases: Sequence[Case]) -> int:
    return sum(cases[0].replicas)


def by_ranks(cases: Sequence[Case]) -> list[list[Case]]:
    ordered = sorted(cases, key=lambda case: sum(case.replicas))
    groups = itertools.groupby(ordered, key=lambda case: sum(case.replicas))
    return [list(group) for _, group in groups]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(cases, marks=[] if num_ranks(cases) in (2, 4) else [pytest.mark.full])
        for cases in by_ranks(COVERING)
    ],
    ids=lambda cases: f"ranks{num_ranks(cases)}",
)
def test_weights_are_those_of_a_replay(cases: list[Case]) -> None:
    check_all(cases)


@pytest.mark.full
@pytest.mark.parametrize("net", ["dense", "sparse"])
@pytest.mark.parametrize("config", PLANS)
def test_all_combinations(config: str, net: str) -> None:
    cases = [
        Case(config, net=net, optimizer=optimizer, mode=mode, minibatches=minibatches)
        for optimizer in OPTIMIZERS
        for mode in ("stash", "vertical_sync", "spectrain")
        for minibatches in (4, 9)
        if mode != "spectrain" or optimizer != "adam"
    ]
    check_all(cases)
