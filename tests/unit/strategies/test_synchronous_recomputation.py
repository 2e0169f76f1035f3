"""Stages that recompute their activations train to the very weights of stages that keep them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.pipeline_cases import Net
from tests.support.processes import outcomes, run
from tests.support.synchronous_cases import NETS, Case, train_one

SPANS: dict[str, Any] = {
    "norm_drop": {"layers": [[1, 3], 5, [6, 8]]},
    "drop": {"layers": [1, 2, [4, 7]]},
    "dense": {"layers": [[0, 2], [3, 5]]},
    "sparse_drop": {"layers": [[0, 5], [6, 9], 11, [15, 20]]},  # one across a cut of two stages
}


class Runs(pl.Callback):
    """How often each layer of this rank began to run in training.

    The last one of a span that runs again ends as soon as nothing more is needed.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        for number, layer in enumerate(pl_module.layers):
            layer.register_forward_pre_hook(partial(self._count, number))

    def _count(self, number: int, *_: Any) -> None:
        self.counts[number] = self.counts.get(number, 0) + 1


def train(rank: int, cases: Sequence[Case]) -> list[Any]:
    """Of each case weights and statistics, losses, and how often layers ran."""
    found = []
    for case in cases:
        runs = Runs()
        state, told, most = train_one(case, rank, callbacks=[runs])
        found.append((state, told, most, runs.counts))
    return found


def every(case: Case) -> list[Case]:
    """The case without recomputation, and with some kinds of it."""
    stages = {"stages": [len(case.replicas) - 1]}
    return [replace(case, recompute=how) for how in ("none", "all", SPANS[case.net], stages)]


def recomputed_layers(case: Case) -> set[int]:
    """By the documents, not by the code."""
    length = len(NETS[case.net]())
    if isinstance(case.recompute, str):
        return set(range(length)) if case.recompute == "all" else set()
    spans = [[n, n] if isinstance(n, int) else n for n in case.recompute.get("layers", [])]
    found = {layer for first, last in spans for layer in range(first, last + 1)}
    bounds = [0, *case.cuts, length]
    for stage in case.recompute.get("stages", []):
        found |= {*range(bounds[stage], bounds[stage + 1])}
    return found


def check(cases: Sequence[Case], found: Sequence[Any]) -> None:
    """The first case keeps all; of the others layers ran twice, and nothing else differs."""
    expected, *others = found
    state, told, most, counts = expected
    for case, (its_state, its_told, its_most, its_counts) in zip(cases[1:], others, strict=True):
        assert its_state.keys() == state.keys()
        for name, value in its_state.items():
            assert torch.equal(value, state[name]), f"{case} {case.recompute}: {name}"
        assert its_told == told, f"{case} {case.recompute}"
        assert most in (None, its_most), "but where a plain Trainer runs"
        twice = recomputed_layers(case)
        assert its_counts == {n: (1 + (n in twice)) * runs for n, runs in counts.items()}, str(case)


def check_all(kinds: Sequence[Case]) -> None:
    """Trains cases of as many ranks in the same processes, one after the other."""
    cases = [each for case in kinds for each in every(case)]
    everyone = run(train, sum(cases[0].replicas), cases, limit_s=60 + 20 * len(cases))
    for found in everyone:
        for first in range(0, len(cases), 4):
            check(cases[first : first + 4], found[first : first + 4])


REFUSED: dict[str, Any] = {
    "'some' says not which layers": "some",
    "layer 3 is named more than once": {"layers": [[1, 3], 3]},
    "'auto' has layers chosen by a profile": "auto",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_suits_no_plan_is_refused_at_once(message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SynchronousPipelineStrategy(recompute=REFUSED[message])
    assert message in refused.value.message
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ({"layers": [[2, 4]]}, r"layer 2 \(ReLU\) works in place .* of layers 2 to 3$"),
        ({"layers": [9]}, "layer 9 is not among the layers 0 to 8"),
        ({"stages": [1, 2]}, "stage 2 is not among the stages 0 to 1"),
    ],
)
def test_what_does_not_suit_the_plan_is_refused_on_every_rank(recompute: Any, message: str) -> None:
    case = Case("1-1", 2, net="norm_drop", recompute=recompute)
    for end in outcomes(train, 2, [case], limit_s=60):
        assert isinstance(end.error, ConfigError)
        assert re.search(message, end.error.message)
        assert end.error.remedy


def test_nothing_changes_in_two_processes() -> None:
    check_all([Case("1-1", 4, "1f1b", net="norm_drop", unkeyed=True, samples=34)])


@pytest.mark.full
def test_nothing_changes_in_a_sparse_net_in_two_processes() -> None:
    check_all([Case("1-1", 3, net="sparse_drop", samples=22, epochs=1)])


@pytest.mark.parametrize(
    "case",
    [
        Case("1", 1, net="norm_drop", samples=34),  # what would be a plain run otherwise
        Case("1", 3, "1f1b", net="norm_drop", unkeyed=True, samples=34),
        Case("1", 4, net="norm_drop", optimizer="adam", samples=34),
        Case("1", 3, net="norm_drop", batch_norm="deferred", samples=34),
        Case("1", 3, "1f1b", net="norm_drop", batch_norm="running", samples=34),
    ],
    ids=str,
)
def test_nothing_changes_on_one_device(case: Case) -> None:
    cases = every(case)
    check(cases, train(0, cases))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
@pytest.mark.parametrize("net", [*SPANS])
@pytest.mark.parametrize("config", ["1", "1-1", "1-1-1", "1-1-1-1", "2-1", "1-2"])
def test_nothing_changes_whatever_the_plan(config: str, net: str, schedule: str) -> None:
    least, readers = max(map(int, config.split("-"))), int(config[0])
    samples = {"drop": 39, "sparse_drop": 22}.get(net, 34) * readers
    check_all(
        [
            Case(config, parts, schedule, net=net, samples=samples, unkeyed=unkeyed)
            for parts in range(least, 9)
            for unkeyed in ([False, True] if net.endswith("drop") else [False])
        ]
    )
