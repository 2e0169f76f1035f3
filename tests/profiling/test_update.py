"""The optimizer's part of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe.cluster import Inventory
from sparsepipe.partition.cost import cost_model
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.searches import exact
from sparsepipe.profiling import LayerProfile, Profile, clock
from sparsepipe.profiling.measure import measure
from sparsepipe.profiling.update import update_seconds

CPU = torch.device("cpu")


class Taking(torch.optim.SGD):
    """Takes so long for each element that it updates, on a clock of its own."""

    now_s = 0.0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            Taking.now_s += 0.001 * sum(p.numel() for p in group["params"])


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taking, "now_s", 0.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: Taking.now_s))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.usefixtures("_clock")
def test_layers_share_the_update_by_their_parameters() -> None:
    net = network()
    make = partial(Taking, lr=0.1, momentum=0.9)
    found = measure(net, [torch.randn(3, 4)], device=CPU, num_warmup=0, num_measured=1,
                    optimizer=make)  # fmt: skip
    assert [layer.update_s for layer in found.layers] == pytest.approx([0.025, 0.0, 0.012])
    assert Profile.from_json(found.to_json()) == found


@pytest.mark.usefixtures("_clock")
def test_the_update_of_a_slowed_device_takes_as_many_times_as_long() -> None:
    @contextmanager
    def slowed() -> Iterator[None]:
        begin_s = Taking.now_s
        yield
        Taking.now_s += 2 * (Taking.now_s - begin_s)

    make = partial(Taking, lr=0.1)
    found_s = update_seconds(network(), make, device=CPU, slowed=slowed)
    assert found_s == pytest.approx(3 * 0.037)


def test_parameters_stay_as_they_are() -> None:
    net = network()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def failing(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)
        steps = iter(range(3))

        def step(*_: Any) -> None:
            if next(steps) == 2:
                raise RuntimeError("no more")
            torch.optim.SGD.step(optimizer)

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    make = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    measure(net, [torch.randn(3, 4)], device=CPU, num_warmup=0, num_measured=1, optimizer=make)
    with pytest.raises(RuntimeError, match="no more"):
        measure(net, [torch.randn(3, 4)], device=CPU, num_measured=1, optimizer=failing)
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(("update_s", "cut"), [(None, 2), (0.0, 2), (4.0, 3)])
def test_a_plan_counts_the_update_where_it_is_known(update_s: float | None, cut: int) -> None:
    """Four layers of a second; the last one's update takes as long as all of them."""
    layers = tuple(
        LayerProfile(
            index=index,
            name=str(index),
            kind="Linear",
            forward_s=0.5,
            backward_s=0.5,
            activation_bytes=0.0,
            parameter_bytes=1.0,
            update_s=update_s if index == 3 else None,
        )
        for index in range(4)
    )
    host = {"name": "here", "devices": [{"name": "device", "count": 2}]}
    problem = Problem.of(
        Inventory.from_dict({"hosts": [host]}),
        {"device": Profile(layers=layers)},
        model=cost_model("sparsepipe_hete"),
        bandwidth_bytes_per_s=0.2,  # so slow that the layers are split and not replicated
    )
    assert [stage.first for stage in exact(problem).stages] == [0, cut]
