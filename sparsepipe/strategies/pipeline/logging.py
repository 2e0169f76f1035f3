"""Carries the values that a step logs from the last stage to every rank.

The last stage records calls of ``self.log`` instead of executing them. Other ranks log the records
as minibatches come back to them; at a drain, every rank replays all records in the order of
minibatches, and then has the same values as one process, bit for bit.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.metrics import last_result, set_last_result

_LOG = inspect.signature(pl.LightningModule.log)
_DROPPED = ("self", "name", "value", "sync_dist", "sync_dist_group", "rank_zero_only")
"""Arguments of ``self.log`` that are not recorded in :attr:`Logged.options`."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One call of ``self.log``.

    Attributes:
        value: the number; for a metric, what its last call returned; None if that is not a number.
        dtype: the value's dtype if it was a tensor, else None.
        metric: for a metric, the dotted name of the module's attribute, else None.
        options: the other arguments of the call.
        weight: if the value is the loss of a microbatch, the weight that the loss has, if any.
    """

    name: str
    value: float | int | bool | None
    dtype: torch.dtype | None
    metric: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float | None = None


Logs = tuple[Logged, ...]
"""Calls of ``self.log`` in one minibatch's step, in order."""


class LogRecorder:
    """Records a module's calls of ``self.log`` instead of executing them."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._names = {
            id(child): name for name, child in module.named_modules() if isinstance(child, Metric)
        }

    @contextmanager
    def recording(self, batch: Any, *, hook: str) -> Iterator[list[Logged]]:
        """Context in which the step ``hook`` on ``batch`` logs into a list; yields the list."""
        notes: list[Logged] = []
        really = self._module.log
        size: int | None = None  # of the batch, determined once

        def log(*args: Any, **kwargs: Any) -> None:
            nonlocal size
            given = _LOG.bind(self._module, *args, **kwargs).arguments
            value = given["value"]
            metric = given.get("metric_attribute") or self._names.get(id(value))
            if isinstance(value, Metric):
                simple = metric is not None
            elif isinstance(value, Tensor):
                simple = value.numel() == 1 and not value.is_complex()
            else:
                simple = isinstance(value, numbers.Real)
            if not simple:
                really(*args, **kwargs)  # raises an error that explains what is wrong
                return
            options = {key: item for key, item in given.items() if key not in _DROPPED}
            options.pop("enable_graph", None)
            on_epoch = given.get("on_epoch")
            counts = hook != "training_step" if on_epoch is None else on_epoch
            if given.get("batch_size") is None and counts and not isinstance(value, Metric):
                size = extract_batch_size(batch) if size is None else size
                options["batch_size"] = size
            name = given["name"]
            if isinstance(value, Metric):
                value = last_result(value)
                value = value if isinstance(value, Tensor) and value.numel() == 1 else None
            else:
                metric = None
            dtype = value.dtype if isinstance(value, Tensor) else None
            number = value.item() if isinstance(value, Tensor) else value
            notes.append(Logged(name, number, dtype, metric, options))

        with replaced_log(self._module, log):
            yield notes


class LogReplay:
    """Replays on this rank the calls of ``self.log`` that the last stage has recorded."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._sums: dict[str, dict[str, Any]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._epoch = -1

    def replay(self, minibatches: Iterable[Logs], *, hook: str) -> None:
        """Resets logged values to those at the last drain, then adds the calls of ``minibatches``.
        These are all minibatches since that drain; :meth:`append` may have logged some already.
        """
        results = internals.logged_values(self._module.trainer)
        assert results is not None
        for key, item in results.items():
            if item.meta.fx == hook and item.is_tensor:
                item.reset()
                vars(item).update(self._sums.get(key, {}))
        self.append(minibatches, hook=hook)
        self._keep_sums(hook)

    def begin(self, hook: str) -> None:
        """Notes the sums before this process's first step of an epoch: those of the steps before a
        stop, if the run resumes within the epoch.
        """
        if (epoch := self._module.trainer.current_epoch) != self._epoch:
            self._epoch = epoch
            self._sums.clear()
            self._keep_sums(hook)

    def _keep_sums(self, hook: str) -> None:
        for key, item in internals.training_values(self._module.trainer).items():
            if item.meta.fx == hook and item.is_tensor:
                held = vars(item)
                self._sums[key] = {n: held[n] for n in internals.ACCUMULATED if n in held}

    def append(self, minibatches: Iterable[Logs], *, hook: str) -> None:
        """Executes the calls recorded for ``minibatches``, adding to what is logged already."""
        results = internals.logged_values(self._module.trainer)
        with internals.logging_hook(self._module, hook):
            for note in (note for logs in minibatches for note in logs):
                value: Any = note.value
                if note.dtype is not None:
                    value = torch.tensor(value, dtype=note.dtype, device=self._module.device)
                if note.metric is not None:
                    result, value = value, self._module.get_submodule(note.metric)
                    set_last_result(value, result)
                # Checks of self.log take about a millisecond in each call. A value with the
                # options of an earlier one is added to it without them.
                can_add = results is not None and results.dataloader_idx is None
                key, options = f"{hook}.{note.name}", dict(note.options)
                if (size := options.pop("batch_size", None)) is None:  # 0 counts as 0
                    size = 1
                if can_add and not isinstance(value, float | int):
                    if key in results and self._options.get(key) == options:
                        results.update_metrics(key, value, size)
                        continue
                    self._options[key] = options  # self.log compares them itself
                self._module.log(note.name, value, **note.options)


@contextmanager
def replaced_log(
    module: pl.LightningModule, log: Callable[..., None] = lambda *args, **kwargs: None
) -> Iterator[None]:
    """Context in which ``log`` replaces a module's ``self.log``; the default logs nothing."""
    object.__setattr__(module, "log", log)
    try:
        yield
    finally:
        object.__delattr__(module, "log")


_REDUCTIONS: Mapping[Any, Callable[[Sequence[float]], float]] = {
    **{"sum": sum, "max": max, "min": min},
    **{torch.sum: sum, torch.max: max, torch.min: min},
}
"""The functions that ``reduce_fx``, an argument of ``self.log``, can name, except the mean."""


def merge_logs(parts: Sequence[tuple[int, Logs]]) -> Logs:
    """Merges the logs of a minibatch's microbatches, given as pairs (number of samples, logs).

    A value's ``reduce_fx``, which Lightning applies over steps, is applied over microbatches as
    well; a mean weights each microbatch by its samples, or by the weight of its loss if the value
    is that loss. Values that a metric returned are averaged.
    """
    if len(parts) == 1:
        return parts[0][1]
    found: dict[tuple[str, int], list[tuple[int, Logged]]] = {}
    for samples, logs in parts:
        calls: dict[str, int] = {}
        for note in logs:
            calls[note.name] = calls.get(note.name, -1) + 1
            found.setdefault((note.name, calls[note.name]), []).append((samples, note))
    merged = []
    for every in found.values():
        notes, first = every, every[0][1]
        sizes = [note.options.get("batch_size") for _, note in notes]
        options = dict(first.options)
        if None not in sizes:
            options["batch_size"] = sum(size for size in sizes if size is not None)
        weights = [
            size or n if note.weight is None else note.weight
            for size, (n, note) in zip(sizes, every, strict=True)
        ]
        if any(weights):  # a loss without weight may be NaN
            notes = [pair for n, pair in zip(weights, every, strict=True) if n]
            weights = [n for n in weights if n]
        values = [note.value for _, note in notes if note.value is not None]
        value: Any = None
        dtype = first.dtype
        if len(values) == len(notes):
            reduce = _REDUCTIONS.get(options.get("reduce_fx", "mean"))
            if reduce is not None:
                value = reduce(values)
            elif all(each == values[0] for each in values):
                value = values[0]  # without any rounding
            else:
                value = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
            if isinstance(value, float) and dtype is not None and not dtype.is_floating_point:
                dtype = torch.get_default_dtype()
        merged.append(Logged(first.name, value, dtype, first.metric, options))
    return tuple(merged)
