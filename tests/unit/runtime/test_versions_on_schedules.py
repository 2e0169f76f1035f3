"""Workers and their weights under whole schedules, all ranks in one process.

The oracle replays delayed SGD: it keeps every version of every stage as clones and runs each
minibatch through the whole network in one go, on the versions that closed formulas name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.runtime.asynchronous_worker import AsynchronousWorker
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.runtime.transport import Kind, Message
from sparsepipe.runtime.weights import Weights
from sparsepipe.schedule import Plan, asynchronous, peaks
from tests.support.weights_cases import CASES, SGD, Case, assert_same, given, loss_of

LIMIT_S = 30.0


class Hall:
    """Where ranks meet. One of them computes at a time, until it waits for another."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.errors: list[BaseException] = []

    def wait(self, ready: Callable[[], bool]) -> None:
        """Lets others go on until it is so."""
        self.turn.notify_all()
        in_time = self.turn.wait_for(lambda: bool(self.errors) or ready(), timeout=LIMIT_S)
        assert in_time, "nobody can go on"
        assert not self.errors, "another rank failed"

    def run(self, works: Iterable[Callable[[], None]]) -> None:
        """Runs what each rank does; raises the first error."""
        threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _run(self, work: Callable[[], None]) -> None:
        with self.turn:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            self.turn.notify_all()


class LocalNetwork:
    """Of one rank; the messages of all are in one place."""

    def __init__(self, hall: Hall, mail: dict[Any, Message], rank: int) -> None:
        self._hall, self._mail, self._rank = hall, mail, rank

    def send(self, kind: Kind, to_rank: int, message: Message, *, held_back: bool = False) -> None:
        self._mail[kind, self._rank, to_rank, message.minibatch] = message

    def receive(self, kind: Kind, from_rank: int, *, minibatch: int) -> Message:
        key = (kind, from_rank, self._rank, minibatch)
        self._hall.wait(lambda: key in self._mail)
        return self._mail.pop(key)

    def release(self, minibatch: int) -> None:
        pass


Rounds = dict[int, dict[int, tuple[Mapping[str, Tensor | None], int]]]


class LocalReplicas:
    """Of one rank; the rounds of all of its stage are in one place."""

    def __init__(self, hall: Hall, rounds: Rounds, *, replica: int, count: int) -> None:
        self._hall, self._rounds, self._replica, self._count = hall, rounds, replica, count
        self._number = 0

    def average(
        self, gradients: Mapping[str, Tensor | None], *, minibatches: int
    ) -> dict[str, Tensor | None]:
        came = self._rounds.setdefault(self._number, {})
        self._number += 1
        came[self._replica] = (gradients, minibatches)
        self._hall.wait(lambda: len(came) == self._count)
        every = [
            found for _, (found, some) in sorted(came.items(), key=lambda item: item[0]) if some
        ]
        return {n: sum(found[n] for found in every) / len(every) for n in every[0]}

    def average_statistics_(self, buffers: Iterable[Tensor]) -> None:
        pass


class Rank:
    """A worker with what it works on; both its ends of the pipeline, and its listener."""

    def __init__(
        self,
        case: Case,
        plan: Plan,
        number: int,
        mode: str,
        *,
        optimizer: Callable[[Any], Any],
        network: LocalNetwork,
        replicas: LocalReplicas,
    ) -> None:
        self.case, self.plan, self.number = case, plan, number
        self.network = case.fresh()
        stage = plan.stage_of(number)
        first, last = plan.stages[stage].layers
        own = {
            name: parameter
            for name, parameter in self.network.named_parameters()
            if first <= int(name.split(".")[0]) <= last
        }
        self.own = nn.ParameterDict({n.replace(".", "/"): p for n, p in own.items()})
        self.optimizer = optimizer(list(own.values())) if own else None
        self.weights = Weights(own, mode, self.optimizer, replicas=plan.replicas(stage))
        self.worker = AsynchronousWorker(
            plan=plan,
            rank=number,
            stage=StageLayers(self.network, self.network, first=first, last=last),
            weights=self.weights,
            replicas=replicas,  # type: ignore[arg-type]
            network=network,  # type: ignore[arg-type]
            steps=self,  # type: ignore[arg-type]
            events=self,
        )
        self.worker.segments = []
        self.steps: list[int] = []

    def train(self, minibatches: int) -> None:
        """From one drain to the next."""
        readers = self.plan.replicas(0)
        for first in range(0, minibatches, readers):
            batch = self.case.batch(first + self.number) if self.number < readers else None
            self.worker.feed(batch, count=min(readers, minibatches - first), number=first)
        self.worker.drain([])

    def open(self, batch: Any) -> tuple[Any, Any]:
        return batch, None

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Tensor, Any]:
        return loss_of(run()), None

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Tensor, Any]:
        return loss_of(run(batch)), None

    def before_backward(self, loss: Tensor) -> None:
        pass

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        self.steps.append(step)
        if self.optimizer is not None:
            given(self.optimizer, self.own, {n.replace(".", "/"): g for n, g in gradients.items()})

    def done(self, minibatch: int, *, loss: Tensor, logs: Any) -> None:
        pass


class Pipeline:
    """All ranks of a plan."""

    def __init__(
        self, case: Case, plan: Plan, mode: str, *, optimizer: Callable[[Any], Any]
    ) -> None:
        self.plan = plan
        self.hall = Hall()
        mail: dict[Any, Message] = {}
        rounds: list[Rounds] = [{} for _ in plan.stages]
        self.ranks = [
            Rank(
                case,
                plan,
                number,
                mode,
                optimizer=optimizer,
                network=LocalNetwork(self.hall, mail, number),
                replicas=LocalReplicas(
                    self.hall,
                    rounds[plan.stage_of(number)],
                    replica=plan.replica_of(number),
                    count=plan.replicas(plan.stage_of(number)),
                ),
            )
            for number in range(plan.num_ranks)
        ]

    def run(self, minibatches: int) -> None:
        """Trains from one drain to the next."""
        self.hall.run([lambda rank=rank: rank.train(minibatches) for rank in self.ranks])  # type: ignore[misc]


CUTS = {
    "mlp": {1: [], 2: [3], 3: [1, 4], 4: [1, 2, 4]},
    "sparse": {1: [], 2: [13], 3: [4, 13], 4: [4, 8, 13]},
}


def plan_of(case: str, config: str) -> Plan:
    layers = len(CASES[case].fresh())
    return Plan.of(config=config, cuts=CUTS[case][len(config.split("-"))], num_layers=layers)


def names_of(network: nn.Sequential, plan: Plan, stage: int) -> list[str]:
    first, last = plan.stages[stage].layers
    names = [name for name, _ in network.named_parameters()]
    return [name for name in names if first <= int(name.split(".")[0]) <= last]


def mean(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(g[name] for g in gradients) / len(gradients) for name in gradients[0]}


def updates_before(plan: Plan, stage: int, minibatch: int) -> int:
    """Updates of a stage before its forward of a minibatch: one for each but those ahead."""
    ranks = sum(plan.replicas(s) for s in range(stage, plan.num_stages))
    replicas = plan.replicas(stage)
    return max(0, minibatch // replicas - (ranks - 1) // replicas)


class Oracle:
    """Delayed SGD, replayed."""

    def __init__(self, case: Case, plan: Plan, mode: str) -> None:
        self.case, self.plan, self.mode = case, plan, mode
        self.network = case.fresh()
        self.names = [names_of(self.network, plan, s) for s in range(plan.num_stages)]
        named = dict(self.network.named_parameters())
        self.optimizers = [
            SGD([named[n] for n in names] or [torch.zeros(1)]) for names in self.names
        ]
        self.named = named
        self.history = [[self.snapshot(s)] for s in range(plan.num_stages)]
        self.rounds: list[list[dict[str, Tensor]]] = [[] for _ in range(plan.num_stages)]

    def snapshot(self, stage: int) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Weights and momentum of a stage's newest version."""
        state = self.optimizers[stage].state
        found = {}
        for name in self.names[stage]:
            parameter = self.named[name]
            momentum = state[parameter].get("momentum_buffer") if parameter in state else None
            clone = None if momentum is None else momentum.clone()
            found[name] = (parameter.detach().clone(), clone)
        return found

    def version(self, stage: int, minibatch: int) -> int:
        if self.mode == "vertical_sync":
            included = updates_before(self.plan, 0, minibatch) * self.plan.replicas(0)
            return included // self.plan.replicas(stage)
        return updates_before(self.plan, stage, minibatch)

    def weights(self, stage: int, minibatch: int) -> dict[str, Tensor]:
        version = self.version(stage, minibatch)
        ahead = minibatch // self.plan.replicas(stage) - version
        found = {}
        for name, (weight, momentum) in self.history[stage][version].items():
            looks = self.mode == "spectrain" and momentum is not None
            found[name] = torch.add(weight, momentum, alpha=-ahead * 0.05) if looks else weight
        return found

    def train(self, minibatches: int) -> None:
        stages = range(self.plan.num_stages)
        for m in range(minibatches):
            worker = deepcopy(self.network)
            for s in stages:
                for name, weight in self.weights(s, m).items():
                    worker.get_parameter(name).data.copy_(weight)
            loss_of(worker(self.case.batch(m))).backward()
            for mine, its in zip(self.network.buffers(), worker.buffers(), strict=True):
                mine.copy_(its)
            for s in stages:
                gradients = {n: worker.get_parameter(n).grad for n in self.names[s]}
                self.rounds[s].append(gradients)
                if (m + 1) % self.plan.replicas(s) == 0 or m + 1 == minibatches:
                    self.update(s)

    def update(self, stage: int) -> None:
        for name, gradient in mean(self.rounds[stage]).items():
            self.named[name].grad = gradient
        self.optimizers[stage].step()
        self.optimizers[stage].zero_grad()
        self.rounds[stage].clear()
        self.history[stage].append(self.snapshot(stage))


def compare(name: str, config: str, mode: str, minibatches: int) -> Pipeline:
    case, plan = CASES[name], plan_of(name, config)
    oracle = Oracle(case, plan, mode)
    oracle.train(minibatches)
    pipeline = Pipeline(case, plan, mode, optimizer=SGD)
    pipeline.run(minibatches)
    for number, rank in enumerate(pipeline.ranks):
        s = plan.stage_of(number)
        found = {n: rank.network.get_parameter(n).detach() for n in oracle.names[s]}
        assert_same(found, {n: oracle.named[n].detach() for n in oracle.names[s]})
        (segment,) = rank.worker.segments
        versions = segment.version_of_forward
        assert versions == {m: oracle.version(s, m) for m in versions}
        assert versions == segment.version_of_backward
        if plan.replicas(s) == 1:  # replicas see their own share of the minibatches
            first, last = plan.stages[s].layers
            for layer in range(first, last + 1):
                its = oracle.network[layer].state_dict()
                assert_same(rank.network[layer].state_dict(), its)
    return pipeline


CONFIGS = ["1", "1-1", "1-1-1", "1-1-1-1", "2", "2-1", "1-2", "1-2-1", "2-1-1", "1-3-1", "2-3"]


PEAKS = {"stash": "stashed", "vertical_sync": "vertical", "spectrain": "predicted"}


@pytest.mark.parametrize("mode", PEAKS)
@pytest.mark.parametrize("minibatches", [1, 6, 13])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_pipeline_is_delayed_sgd_with_the_peak_of_its_schedule(
    config: str, minibatches: int, mode: str
) -> None:
    pipeline = compare("mlp", config, mode, minibatches)
    schedule = asynchronous(pipeline.plan, minibatches)
    found = [rank.worker.segments[0].peak_versions for rank in pipeline.ranks]
    assert found == [getattr(peaks(schedule, rank), PEAKS[mode]) for rank in range(len(found))]


@pytest.mark.parametrize("mode", PEAKS)
@pytest.mark.parametrize(
    "config", ["1-3-1", *(pytest.param(each, marks=pytest.mark.full) for each in ("1-1-1", "2-1"))]
)
def test_a_pipeline_of_a_sparse_network_is_delayed_sgd(config: str, mode: str) -> None:
    compare("sparse", config, mode, 9)


def test_the_delay_matters() -> None:
    """Else the comparisons above would show little."""
    ends = [compare("mlp", config, "stash", 13).ranks[0].network for config in ("1", "1-1-1")]
    assert not torch.allclose(ends[0][0].weight, ends[1][0].weight, rtol=1e-3)


def test_each_segment_has_a_peak_of_its_own() -> None:
    pipeline = Pipeline(CASES["mlp"], plan_of("mlp", "1-1-1"), "stash", optimizer=SGD)
    for minibatches in (9, 1, 2):
        pipeline.run(minibatches)
    segments = [rank.worker.segments for rank in pipeline.ranks]
    assert [[s.peak_versions for s in every] for every in segments] == [
        [3, 1, 2],
        [2, 1, 2],
        [1, 1, 1],
    ]
