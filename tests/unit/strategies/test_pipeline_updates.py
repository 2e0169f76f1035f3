"""An update has the options of its step, what the optimizer noted there, and one gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.strategies.pipeline.optimizer_step import OptionHistory
from tests.support.pipeline_cases import Net, dense_layers, make_loader, pipeline_trainer
from tests.support.processes import run


class Counting(torch.optim.SGD):
    """Keeps numbers of its updates in its groups, in every way there is."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
            group.setdefault("rates", []).append(group["lr"])
            group.setdefault("total", torch.zeros(())).add_(1)
        return super().step(closure)


def counting() -> Counting:
    return Counting([nn.Parameter(torch.zeros(2))], lr=1.0)


def test_each_update_has_its_rate_and_counters_go_on() -> None:
    """Rates fall by half between steps; updates come three steps late, the last at once."""
    optimizer = counting()
    group, past = optimizer.param_groups[0], OptionHistory(optimizer)
    for step in range(6):
        group["lr"] = 0.5**step
        past.record(step)
        if step >= 3:
            with past.as_of(step - 3):
                optimizer.step()
            assert group["lr"] == 0.5**step
    for step in (3, 5, 5):
        with past.as_of(step):
            optimizer.step()
    assert group["rates"] == [1.0, 0.5, 0.25, 0.125, 0.5**5, 0.5**5]
    assert (group["number"], float(group["total"]), group["lr"]) == (6, 6.0, 0.5**5)


def test_an_option_that_two_change_is_refused() -> None:
    optimizer = counting()
    past = OptionHistory(optimizer)
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.5**step  # a scheduler
        past.record(step)
    with pytest.raises(ConfigError, match="changes 'lr'") as refused, past.as_of(0):
        optimizer.param_groups[0]["lr"] *= 0.9  # the optimizer
    assert "leave 'lr'" in refused.value.remedy


class Twice(torch.optim.SGD):
    """Evaluates again after a step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return closure()


class Ascending(torch.optim.SGD):
    """Moves uphill first, as sharpness-aware minimisation does, and evaluates there."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.1)
        return super().step(closure)


class Zeroing(torch.optim.SGD):
    """Lets go of the gradients before it evaluates."""

    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        return super().step(closure)


class Deaf(torch.optim.SGD):
    """Takes the gradients that are there."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class With(Net):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(dense_layers())
        self._make = optimizer

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters(), lr=0.05)


REFUSED = {
    Twice: "Twice evaluates the network several times",
    Ascending: "Ascending changes parameters or gradients before",
    Zeroing: "Zeroing changes parameters or gradients before",
    Deaf: "Deaf does not call the closure",
}


def messages(rank: int) -> list[str]:
    """What each optimizer's first update ends with."""
    found = []
    for kind in REFUSED:
        trainer = pipeline_trainer("1", [], keyed_randomness=True, max_epochs=1)
        with pytest.raises(ConfigError) as refused:
            trainer.fit(With(kind), make_loader("dense", batches=2))
        assert refused.value.remedy
        found.append(refused.value.message)
    return found


def test_optimizers_that_evaluate_by_themselves_are_refused() -> None:
    (found,) = run(messages, 1, environment={"PL_GLOBAL_SEED": "1"})
    for message, expected in zip(found, REFUSED.values(), strict=True):
        assert message.startswith(expected)


def counted(rank: int) -> list[Any]:
    trainer = pipeline_trainer("2-1", [3], max_epochs=2)
    trainer.fit(With(Counting), make_loader("dense", batches=10))
    (group,) = trainer.optimizers[0].param_groups
    return [group["number"], float(group["total"]), len(group["rates"])]


def test_every_stage_counts_its_updates() -> None:
    """Ten minibatches an epoch: five updates of two replicas, ten of one."""
    assert run(counted, 3, limit_s=60) == [[10, 10.0, 10], [10, 10.0, 10], [20, 20.0, 20]]
