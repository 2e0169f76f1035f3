"""Without batch norms weights are those of one process that takes each minibatch in one piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from tests.support.accumulation import Accumulation
from tests.support.norm_cases import distance
from tests.support.pipeline_cases import weights
from tests.support.processes import run
from tests.support.synchronous_cases import Case, make_net, train, train_one

FP32 = 1e-6
"""Share of the largest element by which two orders of summing differ after two epochs, at most."""


def check(case: Case, found: Sequence[Any]) -> None:
    whole = dataclasses.replace(case, config="1", microbatches=1)
    oracle = Accumulation(whole)
    oracle.train()
    expected = oracle.state()
    first = weights(make_net(case).layers)
    assert moved(expected, first) > 100 * FP32, "or nothing is learnt that could differ"
    for state, told, _ in found:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert distance(value, expected[name]) < FP32, f"{case} {case.recompute}: {name}"
        assert told["step"] == pytest.approx(oracle.step_loss, rel=FP32), str(case)


def moved(state: dict[str, Tensor], first: dict[str, Tensor]) -> float:
    """How far the parameter went that went least."""
    return min(distance(value, first[name]) for name, value in state.items())


def normless(config: str, parts: int, net: str, recompute: str = "none") -> Case:
    schedule = ("gpipe", "1f1b")[parts % 2]
    return Case(config, parts, schedule, net=net, samples=34, recompute=recompute)


@pytest.mark.parametrize("net", ["normless", "sparse_normless"])
@pytest.mark.parametrize("parts", [2, 7])
def test_one_device_has_the_weights_of_the_whole_minibatch(parts: int, net: str) -> None:
    case = normless("1", parts, net)
    check(case, [train_one(case)])


def test_two_devices_that_recompute_have_them_too() -> None:
    case = normless("1-1", 3, "normless", "all")
    check(case, [found for (found,) in run(train, 2, [case], limit_s=60)])


@pytest.mark.full
@pytest.mark.parametrize("net", ["normless", "sparse_normless"])
@pytest.mark.parametrize("config", ["1", "1-1", "1-1-1", "1-1-1-1"])
def test_every_depth_and_number_of_microbatches(config: str, net: str) -> None:
    cases = [
        normless(config, parts, net, recompute)
        for parts in range(1, 9)
        for recompute in ("none", "all")
    ]
    everyone = run(train, len(cases[0].replicas), cases, limit_s=60 + 20 * len(cases))
    for number, case in enumerate(cases):
        check(case, [found[number] for found in everyone])
