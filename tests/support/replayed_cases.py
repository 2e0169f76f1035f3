"""What ranks of an asynchronous pipeline trained against a replay of what they recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from sparsepipe.schedule import asynchronous, peak_predicted, peak_stashed, peak_vertical
from tests.support.exactness_cases import Case
from tests.support.pipeline_cases import BATCH, OPTIMIZERS, make_loader, make_net, same
from tests.support.plans import plan_of
from tests.support.replay import Replay, Seen

CPU = torch.device("cpu")
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


def replayed(
    case: Case, segments: Sequence[Sequence[Any]], *, device: torch.device = CPU
) -> tuple[Replay, list[float]]:
    """The oracle, and its losses of the last epoch, on what the ranks recorded."""
    net = make_net(case.net)
    oracle = Replay(
        net.layers.to(device),
        bounds=[0, *case.cuts, len(net.layers)],
        replicas=case.replicas,
        optimizer=OPTIMIZERS[case.optimizer],
    )
    losses: list[float] = []
    for epoch in range(case.epochs):
        records = [record[epoch] for record in segments]
        batches = [(x.to(device), y.to(device)) for x, y in epoch_batches(case, epoch)]
        losses = replay_epoch(case, oracle, epoch, records, batches)
    return oracle, losses


def replay_epoch(
    case: Case, oracle: Replay, epoch: int, records: Sequence[Any], batches: Sequence[Any]
) -> list[float]:
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
        batches,
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


def check(
    case: Case, found: Sequence[Any], *, device: torch.device = CPU, rounding: float = 0.0
) -> None:
    """What ranks found against a replay.

    Args:
        case: what they trained.
        found: by each rank.
        device: where the replay computes.
        rounding: how far both may be apart, in shares of the largest value.
    """
    oracle, losses = replayed(case, [segments for _, segments, _ in found], device=device)
    expected = oracle.state()
    mean = torch.tensor(0.0)
    for loss in losses:
        mean = mean + torch.tensor(loss) * BATCH
    mean = mean / (BATCH * len(losses))
    for state, _, logged in found:
        assert logged == found[0][2], "ranks differ"
        assert logged == pytest.approx(float(mean), rel=rounding, abs=0)
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert torch.equal(value, found[0][0][name]), "ranks differ"
            assert same(value, expected[name], rounding=rounding), f"{case}: {name}"
