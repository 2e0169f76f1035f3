"""Trainings of asynchronous pipelines, and one process that replays what they recorded.

Delayed SGD, written down from its definition: minibatch m goes through the whole network at once,
each stage on the weights it had after the recorded number of updates; a stage's round of gradients
is averaged and given to its own optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

from sparsepipe.schedule import Plan, asynchronous, peaks
from tests.support import synchronous_cases
from tests.support.accumulation import average_statistics
from tests.support.pipeline_cases import (
    BATCH,
    OPTIMIZERS,
    dealt,
    make_loader,
    make_net,
    pipeline_trainer,
    same,
    weights,
)
from tests.support.plans import plan_of

PLANS = {
    "1-1": {"dense": [3], "sparse": [17], "residual": [7], "image": [4]},
    "1-1-1": {"dense": [2, 5], "sparse": [10, 24], "image": [3, 5], "unet": [3, 6]},
    "2-1": {"dense": [4], "sparse": [20], "residual": [6]},
    "1-2": {"dense": [3], "sparse": [14]},
    "1-2-1": {"dense": [1, 5], "sparse": [7, 25]},
    "2-1-1": {"dense": [3, 6], "sparse": [14, 28]},
    "1-3-1": {"dense": [2, 4], "sparse": [10, 20], "wide": [2, 6]},
    "2-3": {"dense": [3], "sparse": [17]},
}


@dataclass(frozen=True)
class Case:
    config: str
    net: str = "dense"
    optimizer: str = "momentum"
    mode: str = "stash"
    predict_backward: bool = False
    minibatches: int = 7  # of an epoch; whole rounds are dealt by Lightning, others by Dealt
    epochs: int = 2
    step_size: int = 0  # of a schedule that halves the learning rate
    grids: Any = None  # of each stage

    @property
    def cuts(self) -> list[int]:
        return PLANS[self.config][self.net]

    @property
    def replicas(self) -> list[int]:
        return [int(part) for part in self.config.split("-")]

    @property
    def steps(self) -> int:
        """Of an epoch: rounds of the first stage, the last one perhaps partial."""
        return -(-self.minibatches // self.replicas[0])

    @property
    def lightning_deals(self) -> bool:
        return self.minibatches % self.replicas[0] == 0

    def ahead(self, stage: int) -> int:
        """Forwards of a stage ahead of its first backward, from the semantics."""
        return (sum(self.replicas[stage:]) - 1) // self.replicas[stage]

    def __str__(self) -> str:
        every = (self.config, self.net, self.optimizer, self.mode, f"m{self.minibatches}")
        return " ".join(every) + (" lr" if self.step_size else "")


def train(rank: int, cases: Sequence[Case], **places: Any) -> list[Any]:
    """Each case's weights, losses and recorded versions on this rank."""
    found = []
    for case in cases:
        net = make_net(case.net, optimizer=case.optimizer, step_size=case.step_size)
        if case.lightning_deals:
            loader = make_loader(case.net, batches=case.minibatches)
        else:
            readers = case.replicas[0]
            reader = rank if rank < readers else 0
            loader = dealt(case.minibatches, readers=readers, reader=reader, net=case.net)
        trainer = pipeline_trainer(
            case.config,
            case.cuts,
            mode=case.mode,
            predict_backward=case.predict_backward,
            grids=case.grids,
            max_epochs=case.epochs,
            callbacks=[Recording()],
            **places,
        )
        recording = trainer.callbacks[0]
        trainer.fit(net, loader)
        found.append(
            (weights(net.layers), recording.segments, float(trainer.callback_metrics["loss"]))
        )
    return found


class Recording(Callback):
    segments: Any = ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.segments = trainer.strategy.pipeline.worker.segments = []


def plan_of_grids(case: Any) -> Plan:
    """A plan of as many ranks, with other layers."""
    count = len(case.replicas)
    return Plan.of(config=case.config, cuts=range(1, count), num_layers=count, grids=case.grids)


def num_ranks(case: Any) -> int:
    return sum(case.replicas) if case.grids is None else plan_of_grids(case).num_ranks


def leaders(found: Sequence[Any], case: Any) -> list[Any]:
    """What the ranks found that speak for their stages; the others of a grid have the same."""
    plan = plan_of_grids(case)
    for rank, mine in enumerate(found):
        for name, value in mine[0].items():
            assert torch.equal(value, found[plan.leader_of(rank)][0][name]), f"rank {rank}: {name}"
    return [mine for rank, mine in enumerate(found) if plan.leader_of(rank) == rank]


def grid_rows() -> list[Any]:
    """Cases with stages that are grids, asynchronous and synchronous ones, of 3 and of 4 ranks."""
    last, both = (None, (1, 2)), ((1, 2), (2, 1))
    first, middle = ((2, 1), None), (None, (1, 2), None)
    images: dict[str, Any] = {"net": "image", "precision": "64-true", "samples": 40}
    drop = {**images, "net": "image_drop"}
    synchronous = synchronous_cases.Case
    return [
        Case("1-1", net="image", grids=last),
        Case("1-1", net="image", grids=first, mode="spectrain"),
        Case("1-1", net="image", grids=both),
        Case("1-1", net="image", grids=both, mode="vertical_sync", optimizer="decay"),
        Case("1-1-1", net="image", grids=middle, step_size=3),
        synchronous("1-1", 4, "gpipe", grids=last, **images),
        synchronous("1-1", 3, "1f1b", grids=first, **drop),
        synchronous("1-1", 3, "eager_1f1b", grids=last, clip=0.05, optimizer="adam", **images),
        synchronous("1-1", 3, "1f1b", grids=both, **drop),
        synchronous("1-1", 4, "1f1b", grids=both, clip=0.05, optimizer="decay", **images),
        synchronous("1-1-1", 4, "eager_1f1b", grids=middle, **images),
    ]


Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Seen:
    """The weights that a minibatch sees in a stage.

    Args:
        version: those after so many updates since the last drain,
        ahead: and so many more steps of lr * v, v being the momentum of that time,
        rate: with this lr.
    """

    version: int
    ahead: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class Past:
    """What a stage's weights and SGD's momentum were after some update."""

    weights: list[Tensor]
    momentum: list[Tensor]


class Replay:
    """A network in stages, in one process."""

    def __init__(
        self,
        layers: nn.Sequential,
        *,
        bounds: Sequence[int],
        replicas: Sequence[int],
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        self.stages = [
            Stage(layers[a:b], replicas=count, optimizer=optimizer)
            for (a, b), count in zip(pairwise(bounds), replicas, strict=True)
        ]

    def segment(
        self,
        batches: Sequence[tuple[Any, Tensor]],
        forward: Callable[[int, int], Seen],
        *,
        backward: Callable[[int, int], Seen] | None = None,
        rate: Callable[[int, int], float] | None = None,
    ) -> list[float]:
        """Replays what ran between two drains; the losses.

        Args:
            batches: input and labels of each minibatch.
            forward: the weights of a stage's forward, by stage and minibatch.
            backward: those of its backward, if they are others.
            rate: learning rate of an update, by stage and round.
        """
        for stage in self.stages:
            stage.begin()
        losses = []
        for minibatch, batch in enumerate(batches):
            losses.append(self._train(minibatch, batch, forward, backward))
            for number, stage in enumerate(self.stages):
                if stage.round_is_full() or minibatch == len(batches) - 1:
                    stage.update(None if rate is None else rate(number, stage.updates))
        for stage in self.stages:
            stage.end()
        return losses

    def _train(
        self,
        minibatch: int,
        batch: tuple[Any, Tensor],
        forward: Callable[[int, int], Seen],
        backward: Callable[[int, int], Seen] | None,
    ) -> float:
        """One minibatch through the whole network; each stage keeps its gradient."""
        value, labels = batch
        for number, stage in enumerate(self.stages):
            stage.use(minibatch, forward(number, minibatch))
            value = stage.replica(minibatch)(value)
        loss = F.cross_entropy(value, labels)
        if backward is not None:
            for number, stage in enumerate(self.stages):
                stage.use(minibatch, backward(number, minibatch))
        loss.backward()
        for stage in self.stages:
            stage.take_gradient(minibatch)
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the names of the whole Sequential."""
        layers = [layer for stage in self.stages for layer in stage.replica(0)]
        return {
            f"{number}.{name}": value
            for number, layer in enumerate(layers)
            for name, value in layer.state_dict().items()
        }


class Stage:
    """Some layers with the weights that they had at all times since the last drain.

    There is a copy of the layers for each replica, since batch norms see different batches.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        *,
        replicas: int,
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        self._copies = [copy.deepcopy(layers) for _ in range(replicas)]
        self._newest = [nn.Parameter(p.detach().clone()) for p in layers.parameters()]
        self._optimizer = optimizer(self._newest) if self._newest else None
        self._past: list[Past] = []
        self._round: list[Gradients] = []

    @property
    def updates(self) -> int:
        """Since the last drain."""
        return len(self._past) - 1

    def replica(self, minibatch: int) -> nn.Sequential:
        """The copy that a minibatch goes through."""
        return self._copies[minibatch % len(self._copies)]

    def begin(self) -> None:
        """After a drain: nothing is known of earlier weights."""
        self._past = [self._present()]

    def use(self, minibatch: int, seen: Seen) -> None:
        """Writes weights into a replica: under its graph, if it has run forward already."""
        past = self._past[seen.version]
        parameters = self.replica(minibatch).parameters()
        for parameter, w, v in zip(parameters, past.weights, past.momentum, strict=True):
            value = torch.add(w, v, alpha=-seen.ahead * seen.rate) if seen.ahead else w
            parameter.data.copy_(value)

    def take_gradient(self, minibatch: int) -> None:
        """Adds a minibatch's gradient to those of the round."""
        parameters = list(self.replica(minibatch).parameters())
        self._round.append([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None

    def round_is_full(self) -> bool:
        """Whether every replica has had its minibatch of the round."""
        return len(self._round) == len(self._copies)

    def update(self, rate: float | None) -> None:
        """One step with the mean gradient of the round, if there is a round."""
        if not self._round:
            return
        gradients, self._round = self._round, []
        if self._optimizer is not None:
            for parameter, *every in zip(self._newest, *gradients, strict=True):
                parameter.grad = _mean(every)
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] if rate is None else rate
            self._optimizer.step()
        self._past.append(self._present())

    def end(self) -> None:
        """A drain: all replicas get the newest weights, and the mean of their statistics."""
        for layers in self._copies:
            for parameter, newest in zip(layers.parameters(), self._newest, strict=True):
                parameter.data.copy_(newest.detach())
        average_statistics(self._copies)

    def _present(self) -> Past:
        return Past(
            weights=[p.detach().clone() for p in self._newest],
            momentum=[self._momentum(p) for p in self._newest],
        )

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        assert self._optimizer is not None
        found = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
        return torch.zeros_like(parameter) if found is None else found.clone()


def _mean(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Over all minibatches of a round; those without a gradient count as zero."""
    present = [g for g in gradients if g is not None]
    return sum(present[1:], present[0]) / len(gradients) if present else None


CPU = torch.device("cpu")
PEAKS = {
    "stash": lambda schedule, rank: peaks(schedule, rank).stashed,
    "vertical_sync": lambda schedule, rank: peaks(schedule, rank).vertical,
    "spectrain": lambda schedule, rank: peaks(schedule, rank).predicted,
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
    """What ranks found against a replay."""
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
