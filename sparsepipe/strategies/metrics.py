"""Merges the states of torchmetrics' metrics, so that a drain leaves equal states on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

from sparsepipe.errors import ConfigError

State = dict[str, Any]
"""A metric's states by name, and under ``"updates"`` the number of its updates."""


def state_of(metric: Metric) -> State:
    """Returns the state of a metric, with its tensors on the CPU."""
    values = {
        name: pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), getattr(metric, name))
        for name in metric._defaults
    }
    return {**values, "updates": metric._update_count}


last_result: Callable[[Metric], Any] = attrgetter("_forward_cache")
"""Returns the value that a metric's last call returned; None if only its ``update`` was called."""


def set_last_result(metric: Metric, value: Any) -> None:
    """Sets what :func:`last_result` returns."""
    metric._forward_cache = value


def set_state(metric: Metric, state: State) -> None:
    """Copies ``state`` to the metric's device, and drops the metric's cached result."""
    for name in metric._defaults:
        value = pytree.tree_map_only(Tensor, lambda t: t.to(metric.device).clone(), state[name])
        setattr(metric, name, value)
    metric._update_count = state["updates"]
    metric._computed = None


def updated_states(module: nn.Module) -> dict[str, State]:
    """Returns, by name, the states of a module's metrics, except of those not updated since their
    last reset.
    """
    for child in module.modules():
        if isinstance(child, MetricCollection):
            child.values(copy_state=False)  # copies a compute group's state to its members
    named = module.named_modules()
    return {n: state_of(m) for n, m in named if isinstance(m, Metric) and m._update_count}


def merged_states(metric: Metric, states: Sequence[State]) -> State | None:
    """Returns merged ``states``; None if a ``dist_reduce_fx`` is not one of torchmetrics' own."""
    if len(states) == 1:
        return states[0]
    result: State = {"updates": sum(state["updates"] for state in states)}
    reductions: dict[str, Any] = metric._reductions
    for part, reduction in reductions.items():
        values = [state[part] for state in states]
        if isinstance(values[0], list):
            result[part] = [item for value in values for item in value]
        elif reduction is dim_zero_cat:
            result[part] = dim_zero_cat(values)
        elif reduction in _OF_STACKED:
            result[part] = reduction(torch.stack(values))
        else:
            return None
    return result


_OF_STACKED: tuple[Any, ...] = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)


class Metrics:
    """The metrics among a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics = {
            name: child for name, child in module.named_modules() if isinstance(child, Metric)
        }
        self._synchronising = {
            name: (metric.sync_on_compute, metric.dist_sync_on_step)
            for name, metric in self._metrics.items()
        }
        self._updated: set[str] = set()
        self._stale: set[str] = set()

    def synchronise(self, on: bool) -> None:
        """Turns the metrics' own synchronisation over ranks off, or restores it if ``on``."""
        for name, metric in self._metrics.items():
            found = self._synchronising[name] if on else (False, False)
            metric.sync_on_compute, metric.dist_sync_on_step = found
            metric._to_sync = metric.sync_on_compute

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Context that records which metrics are updated. After a drain, all replicas of the last
        stage have merged states; only the first goes on from these, so that nothing counts twice.
        """
        merged: dict[str, State] = {}
        for name in self._stale:
            metric = self._metrics[name]
            kept = {part: getattr(metric, part) for part in metric._defaults}
            # A reset empties lists in place, but not tensors.
            kept = {part: [*v] if isinstance(v, list) else v for part, v in kept.items()}
            merged[name] = {**kept, "updates": metric._update_count}
            metric.reset()
        before = {name: metric._update_count for name, metric in self._metrics.items()}
        yield
        updated = {
            name for name, metric in self._metrics.items() if metric._update_count != before[name]
        }
        # Others, such as those of training in a validation, keep their merged states.
        for name in merged.keys() - updated:
            metric = self._metrics[name]
            for part in metric._defaults:
                setattr(metric, part, merged[name][part])
            metric._update_count, metric._computed = merged[name]["updates"], None
        self._updated |= updated
        self._stale -= updated

    def take_updated(self) -> dict[str, State]:
        """Returns, by name, the states (on the CPU) of metrics updated since the last call."""
        updated, self._updated = self._updated, set()
        for parent, child in self._module.named_modules():
            members = {name for name in self._metrics if name.startswith(f"{parent}.")}
            if isinstance(child, MetricCollection) and updated & members:
                child.values(copy_state=False)  # copies a compute group's state to its members
                updated |= members
        return {name: state_of(self._metrics[name]) for name in sorted(updated)}

    def restore(self, own: Mapping[str, State]) -> None:
        """Goes on from the states of :meth:`take_updated` as if they had not been merged."""
        for name, state in own.items():
            set_state(self._metrics[name], state)
        self._updated |= own.keys()
        self._stale -= own.keys()

    def merge(self, parts: Sequence[Mapping[str, State]], *, replica: int | None) -> None:
        """Sets the metrics to the merged ``parts``, from :meth:`take_updated` on the last stage's
        replicas. ``replica``: this rank's index among these replicas; None on other ranks.
        """
        names = {name for part in parts for name in part}
        for name in sorted(names):
            metric = self._metrics[name]
            states = [part[name] for part in parts if name in part]
            merged = merged_states(metric, states)
            if merged is None:
                raise ConfigError(
                    f"the replicas of the last stage cannot merge the states of {name} "
                    f"({type(metric).__name__}), whose dist_reduce_fx is not one of those built "
                    "into torchmetrics",
                    remedy="give the last stage one replica, as in config='2-1'",
                )
            set_state(metric, merged)
        if replica:
            self._stale |= names
