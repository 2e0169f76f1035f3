"""Replay layers: their sizes, their gradients and the order in which time passes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsepipe.emulate.replay import ZEROS, ReplayLayer, ReplayPace
from sparsepipe.emulate.training import ReplayData, ReplayModule
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.runtime.microbatches import split
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.replay_cases import Noted, plain_trainer, profile


def test_activations_parameters_and_gradients_have_their_sizes() -> None:
    module = ReplayModule(profile(), Noted().pace())
    assert [
        None if layer.weight_p is None else 4 * layer.weight_p.numel() for layer in module.layers
    ] == [400, None, 44, 80], "whole floats"
    value = torch.zeros(7, requires_grad=True)
    sizes = []
    for layer in module.layers:
        output = layer(value)
        (gradient,) = torch.autograd.grad(output.sum(), value, retain_graph=True)
        assert gradient.shape == value.shape
        sizes.append(4 * output.numel())
        value = output
    assert sizes == [4000, 4000, 1004, 4], "one float at least"


def test_a_step_takes_the_time_of_each_layer_forward_and_back() -> None:
    noted = Noted()
    module = ReplayModule(profile(), noted.pace())
    loss = module.training_step({"input": torch.zeros(3)}, 0)
    assert noted.taken == [0.1, 0.2, 0.05]
    noted.taken.clear()
    loss.backward()
    assert noted.taken == [0.06, 0.5, 0.3]
    for layer in module.layers:
        if layer.weight_p is not None:
            assert layer.weight_p.grad is not None
            assert layer.weight_p.grad.shape == layer.weight_p.shape


def test_parts_of_a_minibatch_take_and_send_their_shares() -> None:
    noted = Noted()
    module = ReplayModule(profile(), noted.pace(), rows=8)
    (batch,) = ReplayData(profile(input_bytes=160), minibatches=1, rows=8).train_dataloader()
    found = split(batch, 3)
    assert [part.batch["input"].shape for part in found] == [(3, 5), (3, 5), (2, 5)]
    outputs = [module.layers[0](part.batch["input"]) for part in found]
    assert noted.taken == [0.0375, 0.0375, 0.025]
    assert [4 * output.numel() for output in outputs] == [1500, 1500, 1000]
    noted.taken.clear()
    losses = [module.training_step(part.batch, 0) for part in found]
    noted.taken.clear()
    for loss in losses:
        loss.backward()
    assert noted.taken == [0.0225, 0.1875, 0.1125, 0.0225, 0.1875, 0.1125, 0.015, 0.125, 0.075]
    assert module.layers[0].weight_p.grad.shape == (100,)
    untouched = module.layers[0].weight_p.grad
    version = untouched._version
    losses = [module.training_step(part.batch, 0) for part in found]
    losses[0].backward()
    assert module.layers[0].weight_p.grad is untouched, "zeros were added to zeros"
    assert untouched._version == version


def test_what_is_recomputed_takes_its_time_again() -> None:
    noted = Noted()
    layers = ReplayModule(profile(), noted.pace()).layers
    last = len(layers) - 1
    stage = StageLayers(layers, layers, first=0, last=last, recomputed=[range(1, last + 1)])
    leaves = {n: p.detach().requires_grad_() for n, p in layers.named_parameters()}
    flight = stage.forward(torch.zeros(3), minibatch=0, leaves=leaves)
    assert noted.taken == [0.1, 0.2, 0.05]
    noted.taken.clear()
    flight.backward([torch.ones_like(flight.output)], leaves=leaves)
    assert noted.taken == [0.2, 0.05, 0.06, 0.5, 0.3]


def test_layers_before_the_first_parameters_are_not_gone_back_through() -> None:
    layers = profile().layers
    noted = Noted()
    first = ReplayLayer(layers[1], noted.pace())
    second = ReplayLayer(layers[0], noted.pace())
    second(first(torch.zeros(3))).sum().backward()
    assert noted.taken == [0.2, 0.1, 0.3], "no backward of the first"


class Writes(TorchDispatchMode):
    """Bytes of the tensors that operations make or change."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        known = [t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)]
        for tensor in [result] if isinstance(result, torch.Tensor) else []:
            if tensor.untyped_storage().data_ptr() not in known:
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return result


def test_large_layers_cost_no_memory_of_their_own() -> None:
    timeless = partial(LayerProfile, kind="Conv", forward_s=0, backward_s=0)
    large = timeless(index=0, name="0", activation_bytes=2**26, parameter_bytes=2**24)
    small = timeless(index=1, name="1", activation_bytes=4, parameter_bytes=4)
    module = ReplayModule(Profile(layers=(large, small)), Noted().pace())
    ZEROS.of(2**24)  # is made once
    with Writes() as writes:
        loss = module.training_step({"input": ZEROS.of(2**20)}, 0)
        loss.backward()
    shared = ZEROS.of(1).untyped_storage()
    gradient = module.layers[0].weight_p.grad
    assert gradient.untyped_storage().data_ptr() == shared.data_ptr()
    assert gradient.numel() == 2**22
    assert not gradient.any()
    assert writes.largest_bytes < 1000


def test_a_plain_trainer_trains_on_as_many_minibatches(tmp_path: Path) -> None:
    noted = Noted()
    measured = profile(input_bytes=36)
    module = ReplayModule(measured, noted.pace(), momentum=0.9)
    data = ReplayData(measured, minibatches=3)
    assert [4 * batch["input"].numel() for batch in data.train_dataloader()] == [36] * 3
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 3
    assert sum(noted.taken) == pytest.approx(3 * measured.compute_s)


class Clock:
    """Sleeps that end late by turns."""

    def __init__(self, *late_s: float) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []
        self._late_s = list(late_s)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now_s += seconds + (self._late_s.pop(0) if self._late_s else 0.0)


def paced(clock: Clock, time_scale: float = 1.0) -> ReplayPace:
    return ReplayPace(time_scale, clock=clock, sleep=clock.sleep)


def test_short_pauses_are_saved_up() -> None:
    clock = Clock()
    pace = paced(clock)
    for _ in range(1000):
        pace.take(0.0003)
    assert clock.now_s - 100 == pytest.approx(0.3, abs=0.001)
    assert all(seconds >= 0.001 for seconds in clock.sleeps)


def test_the_next_pauses_make_up_for_one_that_ended_late() -> None:
    clock = Clock(0.03)
    pace = paced(clock)
    for _ in range(10):
        pace.take(0.02)
    assert clock.now_s - 100 == pytest.approx(0.2)
    assert clock.sleeps[:3] == pytest.approx([0.02, 0.01, 0.02])


@pytest.mark.parametrize(
    ("worked_s", "slept_s"), [(0.0, 0.5), (0.125, 0.375), (0.5, None), (0.75, None)]
)
def test_work_is_part_of_the_time_that_it_is_replayed_in(
    worked_s: float, slept_s: float | None
) -> None:
    clock = Clock()
    pace = paced(clock, time_scale=10.0)
    begun_s = pace.clock()
    clock.now_s += worked_s
    pace.take(0.05, since_s=begun_s)
    pace.take(0.2)
    assert clock.sleeps == [2.0] if slept_s is None else [slept_s, 2.0], "no other pause is shorter"


MINIBATCHES, ROWS = 3, 8


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
@pytest.mark.parametrize(
    ("recompute", "again"),
    [("none", []), ("all", [0, 1, 2, 3]), ({"layers": [0, [2, 3]]}, [0, 2, 3])],
)
def test_a_step_takes_a_forward_more_of_what_is_recomputed(
    schedule: Any, recompute: Any, again: list[int], tmp_path: Path
) -> None:
    noted, measured = Noted(), profile(input_bytes=160)
    strategy = SynchronousPipelineStrategy(
        schedule=schedule, microbatches=4, recompute=recompute, config="1", cuts=[]
    )
    trainer = plain_trainer(tmp_path, strategy=strategy)
    module = ReplayModule(measured, noted.pace(), rows=ROWS)
    trainer.fit(module, datamodule=ReplayData(measured, minibatches=MINIBATCHES, rows=ROWS))
    more_s = sum(measured.layers[number].forward_s for number in again)
    assert sum(noted.taken) == pytest.approx(MINIBATCHES * (measured.compute_s + more_s))
