"""A plan from what a user writes: replicas for each stage, and cuts or what to share evenly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sparsepipe.errors import ConfigError
from sparsepipe.schedule import Plan
from sparsepipe.schedule.balance import balanced

Balance = Literal["parameters", "flops", "layers"]


def parse_config(config: str | None, *, ranks: int) -> tuple[int, ...]:
    """Replicas of each stage: "2-1" is (2, 1); None is one rank a stage.

    Raises:
        ConfigError: it is no such text, or not for this number of ranks.
    """
    if config is None:
        return (1,) * ranks
    parts = str(config).split("-")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"config={config!r} does not say how many replicas each stage has",
            remedy="write one number a stage, such as '2-1' for three devices in two stages",
        )
    replicas = tuple(map(int, parts))
    if sum(replicas) != ranks:
        raise ConfigError(
            f"config={config!r} is for {sum(replicas)} devices, the Trainer has {ranks}",
            remedy=f"set devices={sum(replicas)}, or a config whose numbers add up to {ranks}",
        )
    return replicas


def make_plan(
    replicas: Sequence[int],
    *,
    cuts: Sequence[int] | None,
    costs: Callable[[], list[float]],
    num_layers: int,
) -> Plan:
    """A plan, from its cuts or by sharing costs evenly.

    Args:
        replicas: of each stage.
        cuts: first layer of each stage but the first; None: computed.
        costs: gives a cost for each layer, asked for only where it is needed.
        num_layers: of the network.

    Raises:
        ConfigError: the plan does not fit the layers.
    """
    config = "-".join(map(str, replicas))
    if cuts is None:
        if len(replicas) > num_layers:
            raise ConfigError(
                f"config={config!r} has {len(replicas)} stages for {num_layers} layers",
                remedy="use at most as many stages as there are layers",
            )
        cuts = balanced(costs(), replicas) if len(replicas) > 1 else []
    return Plan.of(config=config, cuts=list(cuts), num_layers=num_layers)


def check_balance(balance: str) -> None:
    """Refuse what is not a way to share.

    Raises:
        ConfigError: naming those there are.
    """
    if balance not in get_args(Balance):
        raise ConfigError(
            f"balance={balance!r} is unknown", remedy=f"use one of {', '.join(get_args(Balance))}"
        )


def parameter_costs(layers: nn.Sequential) -> list[float]:
    """Number of parameters of each layer."""
    return [float(sum(p.numel() for p in layer.parameters())) for layer in layers]


def flop_costs(layers: nn.Sequential, value: Any) -> list[float]:
    """Floating-point operations of matrix products in each layer's forward pass.

    Args:
        layers: the network, left as it is.
        value: its input.
    """
    costs = []
    training = [(module, module.training) for module in layers.modules()]
    layers.eval()  # running statistics stay, and nothing is drawn at random
    try:
        with torch.no_grad():
            for layer in layers:
                with FlopCounterMode(display=False) as counter:
                    value = layer(value)
                costs.append(float(counter.get_total_flops()))
    finally:
        for module, mode in training:
            module.training = mode
    return costs
