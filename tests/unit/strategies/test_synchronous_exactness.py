"""Ranks that train in microbatches reach the weights of gradient accumulation in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.support.accumulation import check
from tests.support.pipeline_cases import OPTIMIZERS
from tests.support.processes import run
from tests.support.synchronous_cases import Case, train, train_one


def check_all(cases: Sequence[Case]) -> None:
    """Trains cases of as many ranks in the same processes, one after the other."""
    ranks = sum(cases[0].replicas)
    everyone = run(train, ranks, cases, limit_s=60 + 20 * len(cases))
    for number, case in enumerate(cases):
        check(case, [found[number] for found in everyone])


COVERING = [
    Case("1-1", 4),
    Case("1-1", 3, "1f1b", net="dense", samples=34),
    Case("1-1", 7, "eager_1f1b"),
    Case("1-1", 8, "1f1b"),  # of the last batch's 5 samples, three microbatches have none
    Case("1-1", 3, net="sparse_drop", optimizer="adam", samples=22, epochs=1),
    Case("1-1", 1, net="dense"),
    Case("1-1-1", 8, optimizer="decay"),
    Case("1-1-1", 5, "1f1b", net="sparse", samples=22, epochs=1),
    Case("2-1", 4, "1f1b", samples=56),
    Case("2-1", 5, net="dense", optimizer="adam", samples=68),
    Case("2-1", 4, dealt=3),  # in the last step the second device has no batch
    Case("1-2", 3),
    Case("1-2-1", 7, "1f1b"),
    Case("1-2-1", 8, "eager_1f1b", net="drop"),
    Case("1-1-1-1", 6, "1f1b", net="dense", samples=34),
    Case("1-1-1-1", 8, net="drop"),
]


def by_ranks(cases: Sequence[Case]) -> list[list[Case]]:
    ordered = sorted(cases, key=lambda case: sum(case.replicas))
    groups = itertools.groupby(ordered, key=lambda case: sum(case.replicas))
    return [list(group) for _, group in groups]


def marks(cases: Sequence[Case]) -> list[pytest.MarkDecorator]:
    return [] if sum(cases[0].replicas) == 2 else [pytest.mark.full]


@pytest.mark.parametrize(
    "cases",
    [pytest.param(cases, marks=marks(cases)) for cases in by_ranks(COVERING)],
    ids=lambda cases: f"ranks{sum(cases[0].replicas)}",
)
def test_weights_are_those_of_gradient_accumulation(cases: list[Case]) -> None:
    check_all(cases)


@pytest.mark.parametrize(
    "case",
    [Case("1", 1), Case("1", 4), Case("1", 3, "1f1b", net="dense", samples=34), Case("1", 8)],
    ids=str,
)
def test_one_device_accumulates_gradients(case: Case) -> None:
    check(case, [train_one(case)])


COUNTS = (1, 2, 3, 5, 8)
"""Of microbatches: one, fewer and more than there are stages, and some that divide no batch."""


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
@pytest.mark.parametrize("net", ["dense", "drop", "sparse", "sparse_drop"])
@pytest.mark.parametrize("config", ["1", "1-1", "1-1-1", "1-1-1-1"])
def test_every_depth_and_number_of_microbatches(config: str, net: str, schedule: str) -> None:
    samples = 34 if net in ("dense", "sparse") else 39
    optimizers = itertools.cycle(OPTIMIZERS)
    cases = [
        Case(config, parts, schedule, net=net, optimizer=next(optimizers), samples=samples)
        for parts in COUNTS
    ]
    check_all(cases)


@pytest.mark.full
@pytest.mark.parametrize("net", ["dense", "drop", "sparse_drop"])
@pytest.mark.parametrize("config", ["2-1", "1-2", "2-2", "1-2-1", "2-1-1", "1-3-1", "2-3"])
def test_replicas(config: str, net: str) -> None:
    least = max(map(int, config.split("-")))
    readers = int(config[0])
    cases = [
        Case(config, parts, schedule, net=net, samples=34 * readers)
        for parts in COUNTS
        if parts >= least
        for schedule in ("gpipe", "1f1b", "eager_1f1b")
    ]
    check_all(cases)
