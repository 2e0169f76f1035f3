"""Plans from what a user writes; what each layer costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparsepipe.strategies import PipelineStrategy
from sparsepipe.strategies.pipeline.layers import find_layers
from sparsepipe.strategies.pipeline.stage_plan import flop_costs, make_plan, parameter_costs
from tests.support.pipeline_cases import make_loader, make_net, plain_trainer
from tests.support.processes import run


def test_costs_of_layers() -> None:
    net = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 3))
    assert parameter_costs(net) == [50, 20, 0, 33]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(0)
    drawn = torch.get_rng_state()
    assert flop_costs(net, torch.randn(8, 4, generator=torch.Generator())) == [
        2 * 8 * 4 * 10,
        0,
        0,
        2 * 8 * 10 * 3,
    ]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())


def test_plans() -> None:
    assert make_plan((2, 1), cuts=[4], costs=list, num_layers=7).stages[0].layers == (0, 3)
    # Two replicas take twice as much as one.
    plan = make_plan((2, 1), cuts=None, costs=lambda: [1.0] * 6, num_layers=6)
    assert (plan.config, plan.cuts) == ("2-1", (4,))
    assert make_plan((3,), cuts=None, costs=list, num_layers=2).cuts == ()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.other = nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())


def test_the_sequential_there_is() -> None:
    assert find_layers(make_net("dense"), None) == "layers"
    outer = nn.Module()
    outer.network = Inner()
    assert find_layers(outer, None) == "network.layers"
    assert find_layers(outer, "network.other") == "network.other"


def balanced(rank: int, balances: list[str]) -> Any:
    """Cuts when a network is trained, and when it is only tested."""
    found = []
    for balance in balances:
        net, loader = make_net("dense"), make_loader("dense", batches=4, shuffle=True)
        strategy = PipelineStrategy(balance=balance, timeout_s=60)  # type: ignore[arg-type]
        trainer = plain_trainer(devices=2, strategy=strategy, max_epochs=1)
        trainer.fit(net, loader)
        trained = strategy.plan.cuts
        trainer.test(net, loader, verbose=False)
        found.append((trained, strategy.plan.cuts))
    return found


def test_balances() -> None:
    """The products of the three linear layers are 96, 192 and 48 a sample."""
    flops, parameters, layers = run(balanced, 2, ["flops", "parameters", "layers"])[0]
    assert flops[0] == flops[1] == (3,)
    assert parameters[0] == (3,)
    assert layers[0] == (4,)


def first_batches(rank: int, config: str | None) -> Any:
    net = make_net("dense")
    options: dict[str, Any] = {"max_epochs": 2}
    if config is None:
        trainer = plain_trainer(**options)
    else:
        options.update(devices=2, strategy=PipelineStrategy(timeout_s=60))
        trainer = plain_trainer(**options)
    seen: list[float] = []
    net.on_train_batch_start = lambda batch, _: seen.append(
        float(batch[0].sum()) if isinstance(batch, list) else 0.0
    )
    torch.manual_seed(3)
    trainer.fit(net, make_loader("dense", batches=4, shuffle=True))
    return seen


def test_reading_a_batch_for_its_costs_changes_no_order() -> None:
    """The default: one stage a device, an equal share of the products."""
    (plain,) = run(first_batches, 1, None)
    reader, other = run(first_batches, 2, "default", environment={"PL_GLOBAL_SEED": "1"})
    assert reader == plain
    assert other == [0.0] * 8
    assert len(set(plain)) == 8
