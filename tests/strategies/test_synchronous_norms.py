"""Batch norms of ranks that train in microbatches, against one process with the whole minibatch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from norm_cases import Normed, distance, whole
from pipeline_cases import OPTIMIZERS, QUIET, plain_trainer, weights
from processes import run
from synchronous_cases import Case, loader, make_net, train, train_one
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.sparse import BatchNorm
from sparsepipe.strategies import SynchronousPipelineStrategy

RUNNING = ("running_mean", "running_var")
FP32 = 1e-6
"""Of the largest element: so much do two orders of summing differ."""


def check(case: Case, found: Sequence[Any]) -> None:
    oracle = Normed(case)
    oracle.train()
    expected = oracle.state()
    for state, _, _ in found:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            statistic = name.endswith(RUNNING)
            if case.batch_norm == "deferred" and not statistic:
                # No gradient hangs on what is summed in another order.
                assert torch.equal(value, expected[name]), f"{case}: {name}"
            elif name.endswith("num_batches_tracked"):
                assert torch.equal(value, expected[name]), f"{case}: {name}"
            else:
                assert distance(value, expected[name]) < FP32, f"{case}: {name}"
    check_same([state for state, _, _ in found], case)
    if case.batch_norm == "running" and case.replicas[0] == 1:
        check_whole(case, found[0][0])


def check_same(states: Sequence[dict[str, Tensor]], case: Any) -> None:
    for state in states[1:]:
        for name, value in state.items():
            assert torch.equal(value, states[0][name]), f"{case}: {name}"


def check_whole(case: Case, state: dict[str, Tensor]) -> None:
    oracle = whole(case)
    oracle.train()
    for name, value in oracle.state().items():
        assert distance(state[name], value) < FP32, f"{case}, whole: {name}"


def check_all(cases: Sequence[Case]) -> None:
    """Trains cases of as many ranks in the same processes, one after the other."""
    ranks = sum(cases[0].replicas)
    everyone = run(train, ranks, cases, limit_s=60 + 20 * len(cases))
    for number, case in enumerate(cases):
        check(case, [found[number] for found in everyone])


def of(mode: str, config: str, parts: int, schedule: str = "gpipe", **options: Any) -> Case:
    net = options.pop("net", "dense")
    samples = options.pop("samples", 34)
    return Case(config, parts, schedule, net=net, samples=samples, batch_norm=mode, **options)


COVERING = {
    1: [of("deferred", "1", 3), of("running", "1", 1), of("running", "1", 4, net="sparse")],
    2: [
        of("deferred", "1-1", 4, "1f1b"),
        of("deferred", "1-1", 3, net="sparse", samples=23, epochs=1),
        of("running", "1-1", 3),
        of("running", "1-1", 8, "1f1b", samples=39),  # three microbatches of the last are empty
        of("running", "1-1", 2, net="sparse", samples=22, epochs=1),
    ],
    3: [
        of("deferred", "2-1", 4, samples=68),
        of("deferred", "1-2", 3, "1f1b"),
        of("deferred", "2-1", 2, dealt=3),  # in the last step the second device has no batch
        of("running", "1-2", 3),
        of("running", "1-1-1", 2, optimizer="adam"),
    ],
}


@pytest.mark.parametrize("ranks", COVERING)
def test_norms_are_those_of_one_process(ranks: int) -> None:
    if ranks > 1:
        check_all(COVERING[ranks])
        return
    for case in COVERING[ranks]:
        check(case, [train_one(case)])
