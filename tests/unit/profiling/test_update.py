"""The optimizer's part of a profile, and that of copies of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe.cluster import Inventory
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.algorithms import exact
from sparsepipe.profiling import Profile
from sparsepipe.profiling import timing as clock
from sparsepipe.profiling.measure import measure
from sparsepipe.profiling.timing import Updates
from tests.support.instances import profile_of

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


@pytest.fixture
def _copies(_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes half as long as an update."""
    real = torch.Tensor.copy_

    def copy_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        Taking.now_s += 0.0005 * tensor.numel()
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.usefixtures("_copies")
def test_layers_share_an_update_and_a_copy_by_their_parameters() -> None:
    make = partial(Taking, lr=0.1, momentum=0.9)
    found = measure(network(), [torch.randn(3, 4)], device=CPU, num_warmup=1, num_measured=5,
                    optimizer=make)  # fmt: skip
    assert [layer.copy_s for layer in found.layers] == pytest.approx([0.0125, 0.0, 0.006])
    assert [layer.update_s for layer in found.layers] == pytest.approx([0.025, 0.0, 0.012])
    assert found.copy_s == pytest.approx(0.0185)
    assert Profile.from_json(found.to_json()) == found
    partly = replace(found.layers[0], copy_s=None)
    assert replace(found, layers=(partly, *found.layers[1:])).copy_s is None


@pytest.mark.usefixtures("_copies")
def test_both_take_as_many_times_as_long_on_a_slowed_device() -> None:
    @contextmanager
    def slowed() -> Iterator[None]:
        begin_s = Taking.now_s
        yield
        Taking.now_s += 2 * (Taking.now_s - begin_s)

    net = network()
    updates = Updates(net, partial(Taking, lr=0.1), device=CPU, slowed=slowed)
    updates.take()
    shares_s = updates.shares_s(net)
    assert sum(shares_s["update_s"]) == pytest.approx(3 * 0.037)
    assert sum(shares_s["copy_s"]) == pytest.approx(3 * 0.0185)


@pytest.mark.usefixtures("_clock")
def test_frozen_layers_have_no_update_and_shared_ones_one() -> None:
    tied, frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    net = nn.Sequential(tied, frozen, tied)
    make = partial(Taking, lr=0.1)
    found = measure(net, [torch.randn(3, 4)], device=CPU, num_warmup=0, num_measured=5,
                    optimizer=make)  # fmt: skip
    assert [layer.update_s for layer in found.layers] == pytest.approx([0.020, 0.0, 0.0])
    assert frozen.weight.grad is None


def test_an_optimizer_that_wants_a_closure_gets_one() -> None:
    class Asking(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    net = network()
    updates = Updates(net, partial(Asking, lr=0.1), device=CPU, slowed=nullcontext)
    updates.take()
    assert sum(updates.shares_s(net)["update_s"]) > 0


def test_a_network_without_parameters_has_no_update() -> None:
    found = measure(nn.Sequential(nn.ReLU()), [torch.randn(3, 4)], device=CPU, num_warmup=0,
                    num_measured=1, optimizer=partial(Taking, lr=0.1))  # fmt: skip
    assert found.update_s == found.copy_s == 0.0


def test_parameters_stay_as_they_are() -> None:
    net = network()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def failing(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)
        calls = iter(range(3))

        def step(*_: Any) -> None:
            if next(calls) == 2:
                raise RuntimeError("no more")
            torch.optim.SGD.step(optimizer)

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    make = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    measure(net, [torch.randn(3, 4)], device=CPU, num_warmup=0, num_measured=1, optimizer=make)
    with pytest.raises(RuntimeError, match="no more"):
        measure(net, [torch.randn(3, 4)], device=CPU, num_measured=9, optimizer=failing)
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def profile(updates_s: Sequence[float | None]) -> Profile:
    """Layers of a second each."""
    each = {"forward_s": 0.5, "backward_s": 0.5, "parameter_bytes": 1.0}
    return profile_of({**each, "update_s": update_s} for update_s in updates_s)


NONE = (None, None, None, None)
LAST = (0.0, 0.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("first", "second", "cut"),
    [
        (NONE, NONE, 2),
        (LAST, LAST, 3),
        (NONE, LAST, 2),  # or the device whose update nobody knows would look faster than it is
        ((None, 0.0, 0.0, 4.0), LAST, 2),
    ],
)
def test_a_plan_counts_updates_where_all_are_known(
    first: Sequence[float | None], second: Sequence[float | None], cut: int
) -> None:
    """The last layer's update takes as long as all layers."""
    devices = [{"name": "first", "count": 1}, {"name": "second", "count": 1}]
    problem = Problem.of(
        Inventory.from_dict({"hosts": [{"name": "here", "devices": devices}]}),
        {"first": profile(first), "second": profile(second)},
        model=cost_model("sparsepipe_hete"),
        bandwidth_bytes_per_s=0.2,  # so slow that the layers are split and not replicated
    )
    assert [stage.first for stage in exact(problem).stages] == [0, cut]
