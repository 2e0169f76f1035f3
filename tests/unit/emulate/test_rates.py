"""Rates from times written out by hand."""

from __future__ import annotations

import pytest

from sparsepipe.emulate.rates import rates
from sparsepipe.errors import ConfigError

# Ten steps of 2 s each, but the first four, which fill, and the last, which drains.
ENDS_S = [100.5, 101, 101.5, 102, 104, 106, 108, 110, 112, 120]


def test_the_steady_part_neither_fills_nor_drains() -> None:
    found = rates(ENDS_S, begin_s=100, per_step=1, time_scale=1, ahead=3)
    assert found.steady_per_s == 0.5
    assert found.steady_steps == 3
    assert found.epoch_per_s == 0.5
    assert found.epoch_s == 20
    assert found.minibatches == 10


def test_time_is_that_of_the_cluster() -> None:
    found = rates(ENDS_S, begin_s=100, per_step=1, time_scale=10, ahead=3)
    assert found.steady_per_s == pytest.approx(5)
    assert found.epoch_s == 2


def test_a_step_is_a_minibatch_of_each_replica() -> None:
    found = rates(ENDS_S, begin_s=100, per_step=4, time_scale=1, ahead=3)
    assert (found.steady_per_s, found.epoch_per_s, found.minibatches) == (2.0, 2.0, 40)


def test_a_long_way_ahead_is_left_out() -> None:
    found = rates(ENDS_S, begin_s=100, per_step=1, time_scale=1, ahead=6)
    assert found.steady_steps == 1
    assert found.steady_per_s == 0.5


@pytest.mark.parametrize(("steps", "ahead"), [(1, 0), (4, 0), (10, 7)])
def test_too_few_steps_are_refused(steps: int, ahead: int) -> None:
    with pytest.raises(ConfigError, match=f"{steps} steps has no steady part") as caught:
        rates(ENDS_S[:steps], begin_s=100, per_step=1, time_scale=1, ahead=ahead)
    least = int(caught.value.remedy.split(" to ")[1].split()[0])
    enough = [float(k) for k in range(least)]
    assert rates(enough, begin_s=-1, per_step=1, time_scale=1, ahead=ahead).steady_steps >= 1
