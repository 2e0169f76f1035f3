"""Distributed weights equal those of one process that replays the recorded versions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.support.exactness_cases import PLANS, Case, train
from tests.support.pipeline_cases import OPTIMIZERS
from tests.support.processes import run
from tests.support.replayed_cases import check


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
