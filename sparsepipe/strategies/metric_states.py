"""States of a torchmetric: taken, merged with those of other minibatches, and put in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

State = dict[str, Any]
"""Names and values of a metric's states, and ``"updates"``, how often it was updated."""


def state_of(metric: Metric) -> State:
    """A metric's, on the host."""
    values = {
        name: _map(lambda t: t.detach().cpu(), getattr(metric, name)) for name in metric._defaults
    }
    return {**values, "updates": metric._update_count}


def put_state(metric: Metric, state: State) -> None:
    """Gives a metric a state, on its device; what it has computed does not hold any more."""
    for name in metric._defaults:
        setattr(metric, name, _map(lambda t: t.to(metric.device).clone(), state[name]))
    metric._update_count = state["updates"]
    metric._computed = None


def merged_states(metric: Metric, states: Sequence[State]) -> State | None:
    """That of all the minibatches that several are of; None where the metric has no rule for it."""
    if len(states) == 1:
        return states[0]
    result: State = {"updates": sum(state["updates"] for state in states)}
    for part, reduction in metric._reductions.items():
        merge = _MERGES.get(reduction) if not isinstance(states[0][part], list) else _joined
        if merge is None:
            return None
        result[part] = merge([state[part] for state in states])
    return result


def _joined(values: Iterable[Any]) -> list[Any]:
    return [item for value in values for item in value]


def _stacked(reduction: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    return lambda values: reduction(torch.stack(list(values)))


_MERGES: dict[Any, Callable[[Sequence[Any]], Any]] = {
    dim_zero_sum: _stacked(dim_zero_sum),
    dim_zero_mean: _stacked(dim_zero_mean),
    dim_zero_max: _stacked(dim_zero_max),
    dim_zero_min: _stacked(dim_zero_min),
    dim_zero_cat: lambda values: dim_zero_cat(list(values)),
}


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return [function(item) if isinstance(item, Tensor) else item for item in value]
