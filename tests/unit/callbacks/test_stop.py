"""The clock of an emulated training, with times and plans written out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparsepipe.callbacks import Pulse
from sparsepipe.errors import ConfigError
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.plans import plan_of

BEGIN_S = 90.0
ENDS_S = [100.0 + k * k for k in range(10)]  # so that no two steps take as long


class Planned(PipelineStrategy):
    """A strategy that has its plan already, as in a Trainer that runs."""

    def __init__(self, *replicas: int) -> None:
        self._plan = plan_of("-".join(map(str, replicas)))


class PlannedWhole(SynchronousPipelineStrategy):
    """The same of a synchronous pipeline."""

    def __init__(self, *replicas: int) -> None:
        self._plan = plan_of("-".join(map(str, replicas)))


def trainer(strategy: object, *, ranks: int, steps: int = len(ENDS_S)) -> Any:
    """What a callback is told; it is not the first rank, which alone limits links."""
    return SimpleNamespace(
        strategy=strategy, world_size=ranks, num_training_batches=steps, is_global_zero=False
    )


def beaten(pulse: Pulse, told: Any) -> Pulse:
    """The pulse of a whole epoch."""
    module: Any = None
    pulse.on_train_start(told, module)
    pulse.on_train_epoch_start(told, module)
    for step in range(told.num_training_batches):
        pulse.on_train_batch_end(told, module, None, None, step)
    pulse.on_train_end(told, module)
    return pulse


def test_a_synchronous_pipeline_is_not_ahead_of_itself() -> None:
    pulse = Pulse(1.0, clock=iter([BEGIN_S, *ENDS_S]).__next__)
    found = beaten(pulse, trainer(PlannedWhole(2, 11), ranks=13)).rates()
    assert found.steady_steps == 3, "from the end of step 5 to that of step 8"
    assert found.steady_per_s == pytest.approx(2 * 3 / (164 - 125))


@pytest.mark.parametrize("time_scale", [1.0, 4.0, 0.5])
def test_the_rates_of_a_pipeline_are_in_the_clusters_time(time_scale: float) -> None:
    """Two replicas at the first stage, which goes 12 // 2 = 6 steps ahead of its backward."""
    pulse = Pulse(time_scale, clock=iter([BEGIN_S, *ENDS_S]).__next__)
    found = beaten(pulse, trainer(Planned(2, 11), ranks=13)).rates()
    assert found.steady_steps == 1, "from the end of step 7 to that of step 8"
    assert found.steady_per_s == pytest.approx(2 * 1 / ((164 - 149) / time_scale))
    assert found.epoch_s == pytest.approx((181 - 90) / time_scale)
    assert found.epoch_per_s == pytest.approx(20 / (91 / time_scale))
    assert found.minibatches == 20


def test_a_step_of_data_parallelism_is_a_minibatch_of_each_rank() -> None:
    pulse = Pulse(4.0, clock=iter([BEGIN_S, *ENDS_S]).__next__)
    found = beaten(pulse, trainer(object(), ranks=3)).rates()
    assert found.steady_steps == 3, "from the end of step 5 to that of step 8"
    assert found.steady_per_s == pytest.approx(3 * 3 / ((164 - 125) / 4))
    assert found.epoch_s == pytest.approx(91 / 4)
    assert found.minibatches == 30


def test_an_epoch_that_is_never_steady_is_refused_before_it_begins() -> None:
    pulse = Pulse(1.0, clock=iter(()).__next__)
    with pytest.raises(ConfigError, match="9 steps has no steady part") as caught:
        beaten(pulse, trainer(Planned(2, 11), ranks=13, steps=9))
    assert "limit_train_batches to 10 or more" in caught.value.remedy
