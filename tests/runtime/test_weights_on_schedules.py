"""Stages and their weights under whole schedules, all ranks in one process.

The oracle replays delayed SGD: it keeps every version of every stage as clones and runs each
minibatch through the whole network in one go, on the versions that closed formulas name.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weights_cases import CASES, SGD, Case, assert_same, loss_of

from sparsepipe.runtime.stage import Passage, Stage
from sparsepipe.runtime.weights import Weights
from sparsepipe.schedule import Action, Plan, asynchronous
from sparsepipe.schedule.versions import peak_stashed, peak_vertical

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


@dataclass
class Rank:
    """One rank's state, driven from outside."""

    stage: Stage
    weights: Weights
    network: nn.Module
    optimizer: torch.optim.Optimizer
    todo: list[Action]
    passages: dict[int, Passage] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] | None = None


class Pipeline:
    """All ranks in one process; an action runs when its messages are there."""

    def __init__(self, case: Case, plan: Plan, mode: str, minibatches: int) -> None:
        self.case, self.plan, self.minibatches = case, plan, minibatches
        self.ranks = []
        for rank, actions in enumerate(asynchronous(plan, minibatches).actions):
            network = case.fresh()
            s = plan.stage_of(rank)
            first, last = plan.stages[s].layers
            own = {n: network.get_parameter(n) for n in names_of(network, plan, s)}
            optimizer = SGD(list(own.values()) or [torch.zeros(1)])
            weights = Weights(own, mode, optimizer, replicas=plan.replicas(s))
            stage = Stage(network, network, first=first, last=last)
            self.ranks.append(Rank(stage, weights, network, optimizer, list(actions)))
            self.announce(self.ranks[-1], plan.replica_of(rank))
        self.messages: dict[tuple[str, int, int], Any] = {}
        for m in range(minibatches):
            self.messages["F", 0, m] = (case.batch(m), None)
            self.messages["B", plan.num_stages - 1, m] = None

    def announce(self, rank: Rank, minibatch: int) -> None:
        """Says which minibatch comes next, if it does, so that vertical sync keeps no more."""
        needed = updates_before(self.plan, 0, minibatch) * self.plan.replicas(0)
        rank.weights.keep_from(needed if minibatch < self.minibatches else None)

    def run(self) -> None:
        while any(rank.todo for rank in self.ranks):
            before = sum(len(rank.todo) for rank in self.ranks)
            for number, rank in enumerate(self.ranks):
                while rank.todo and self.step(number, rank, rank.todo[0]):
                    pass
            assert sum(len(rank.todo) for rank in self.ranks) < before, "nobody can go on"

    def step(self, number: int, rank: Rank, action: Action) -> bool:
        """Runs the action if it can be; all replicas update at once."""
        s = self.plan.stage_of(number)
        if action.kind == "U":
            return self.update(s, action)
        key = (action.kind, s, action.number)
        if key not in self.messages:
            return False
        message = self.messages.pop(key)
        if action.kind == "F":
            self.forward(s, rank, action.number, *message)
        else:
            self.backward(s, rank, action.number, message)
        rank.todo.pop(0)
        return True

    def forward(self, s: int, rank: Rank, m: int, value: Any, included: int | None) -> None:
        version = rank.weights.version
        if s == 0:
            included = version * self.plan.replicas(0)
        ahead = m // self.plan.replicas(s) - version
        leaves = rank.weights.begin(m, version=version, ahead=ahead, included=included)
        self.announce(rank, m + self.plan.replicas(s))
        last = s == self.plan.num_stages - 1
        close = (lambda run: (loss_of(run()), None)) if last else None
        passage = rank.stage.forward(value, minibatch=m, leaves=leaves, close=close)
        rank.passages[m] = passage
        if not last:
            self.messages["F", s + 1, m] = (passage.output, included)

    def backward(self, s: int, rank: Rank, m: int, gradients: Any) -> None:
        passage = rank.passages.pop(m)
        self.messages["B", s - 1, m] = passage.backward(gradients, leaves=rank.weights.again(m))
        rank.gradients = rank.weights.finish(m)

    def update(self, s: int, action: Action) -> bool:
        replicas = [self.ranks[rank] for rank in self.plan.ranks_of(s)]
        if not all(rank.todo and rank.todo[0] == action for rank in replicas):
            return False
        gradients = mean([rank.gradients for rank in replicas if rank.gradients is not None])
        for rank in replicas:
            with rank.weights.updating():
                for name, gradient in gradients.items():
                    rank.network.get_parameter(name).grad = gradient.clone()
                rank.optimizer.step()
                rank.optimizer.zero_grad()
            rank.gradients = None
            rank.todo.pop(0)
        return True


def compare(name: str, config: str, mode: str, minibatches: int) -> Pipeline:
    case, plan = CASES[name], plan_of(name, config)
    oracle = Oracle(case, plan, mode)
    oracle.train(minibatches)
    pipeline = Pipeline(case, plan, mode, minibatches)
    pipeline.run()
    for number, rank in enumerate(pipeline.ranks):
        s = plan.stage_of(number)
        found = {n: rank.network.get_parameter(n).detach() for n in oracle.names[s]}
        assert_same(found, {n: oracle.named[n].detach() for n in oracle.names[s]})
        versions = rank.weights.version_of_forward
        assert versions == {m: oracle.version(s, m) for m in versions}
        assert versions == rank.weights.version_of_backward
        if plan.replicas(s) == 1:  # replicas see their own share of the minibatches
            first, last = plan.stages[s].layers
            for layer in range(first, last + 1):
                its = oracle.network[layer].state_dict()
                assert_same(rank.network[layer].state_dict(), its)
    return pipeline


CONFIGS = ["1", "1-1", "1-1-1", "1-1-1-1", "2", "2-1", "1-2", "1-2-1", "2-1-1", "1-3-1", "2-3"]
MODES = ["stash", "vertical_sync", "spectrain"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_pipeline_is_delayed_sgd(config: str, mode: str) -> None:
    compare("mlp", config, mode, 13)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", ["1-1-1", "2-1", "1-3-1"])
def test_a_pipeline_of_a_sparse_network_is_delayed_sgd(config: str, mode: str) -> None:
    compare("sparse", config, mode, 9)


def test_the_delay_matters() -> None:
    """Else the comparisons above would show little."""
    ends = [compare("mlp", config, "stash", 13).ranks[0].network for config in ("1", "1-1-1")]
    assert not torch.allclose(ends[0][0].weight, ends[1][0].weight, rtol=1e-3)


@pytest.mark.parametrize("config", CONFIGS)
def test_no_more_versions_than_forwards_ahead(config: str) -> None:
    pipeline = compare("mlp", config, "stash", 25)
    for number, rank in enumerate(pipeline.ranks):
        stage = pipeline.plan.stage_of(number)
        assert rank.weights.peak_versions == pipeline.plan.warmup(stage) + 1


@pytest.mark.parametrize("minibatches", [1, 6, 13])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_schedule_foretells_the_peak(config: str, minibatches: int) -> None:
    for mode, foretold in [("stash", peak_stashed), ("vertical_sync", peak_vertical)]:
        pipeline = compare("mlp", config, mode, minibatches)
        schedule = asynchronous(pipeline.plan, minibatches)
        found = [rank.weights.peak_versions for rank in pipeline.ranks]
        assert found == [foretold(schedule, rank) for rank in range(len(found))]
