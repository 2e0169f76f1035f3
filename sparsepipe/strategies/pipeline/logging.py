"""Values that a step logs, carried from the last stage to every rank.

``self.log`` on the last stage is noted instead of done. The notes travel upstream with the
gradients and are shown where they come by; at a drain every rank gets all of them and
repeats them in the order of the minibatches, so that it holds bitwise what one process
would.
"""

from __future__ import annotations

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

_DROPPED = ("sync_dist", "sync_dist_group", "rank_zero_only", "enable_graph")
"""Options of ``self.log`` that mean nothing where every rank holds everything."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One call of ``self.log``.

    Attributes:
        value: the number; of a metric, what its last call returned, if it was called.
        dtype: of a tensor.
        metric: attribute of the module that was logged.
    """

    name: str
    value: float | int | bool | None
    dtype: torch.dtype | None
    metric: str | None
    options: Mapping[str, Any] = field(default_factory=dict)


Logs = tuple[Logged, ...]
"""What one minibatch's step logged, in order."""


class Recorder:
    """Records calls of ``self.log`` of a module instead of doing them."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._names = {
            id(child): name for name, child in module.named_modules() if isinstance(child, Metric)
        }

    @contextmanager
    def recording(self, batch: Any, *, epoch_default: bool) -> Iterator[list[Logged]]:
        """Records what is logged within."""
        notes: list[Logged] = []
        really = self._module.log
        sizes: list[int] = []

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            options = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
            metric = self._metric(value, options)
            if not _simple(value, metric):
                really(name, value, **options)  # raises an error that explains what is wrong
                return
            on_epoch = options.get("on_epoch")
            counts = epoch_default if on_epoch is None else on_epoch
            if options.get("batch_size") is None and counts and not isinstance(value, Metric):
                sizes[:] = sizes or [extract_batch_size(batch)]
                options["batch_size"] = sizes[0]
            notes.append(self._note(name, value, options))

        with _instead_of_log(self._module, log):
            yield notes

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Drops what is logged within."""
        with _instead_of_log(self._module, lambda *args, **kwargs: None):
            yield

    def _metric(self, value: Any, options: Mapping[str, Any]) -> str | None:
        """Attribute of the module that a logged value is, if it is one."""
        name = options.get("metric_attribute") or self._names.get(id(value))
        return None if name is None else str(name)

    def _note(self, name: str, value: Any, options: Mapping[str, Any]) -> Logged:
        kept = {key: item for key, item in options.items() if key not in _DROPPED}
        if isinstance(value, Metric):
            cached = last_result(value)
            number = cached if isinstance(cached, Tensor) and cached.numel() == 1 else None
            return Logged(
                name,
                None if number is None else number.item(),
                None if number is None else number.dtype,
                self._metric(value, options),
                kept,
            )
        if isinstance(value, Tensor):
            return Logged(name, value.item(), value.dtype, None, kept)
        return Logged(name, value, None, None, kept)


_POSITIONAL = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""Order of the arguments of ``LightningModule.log`` after name and value."""


class LogReplay:
    """Repeats recorded calls of ``self.log`` on this rank."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._sums: dict[str, dict[str, Any]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._epoch = -1

    def show(self, logs: Logs, *, hook: str) -> None:
        """Repeats the calls of one minibatch until the next :meth:`replay`."""
        with internals.logging_hook(self._module, hook):
            self._repeat(logs)

    def replay(self, minibatches: Iterable[Logs], *, hook: str) -> None:
        """Repeats the calls of minibatches since the last drain, after those of earlier drains."""
        trainer = self._module.trainer
        results = internals.logged_values(trainer)
        assert results is not None
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self._sums.clear()
        mine = {key: item for key, item in results.items() if item.meta.fx == hook}
        for key, item in mine.items():
            if item.is_tensor:
                item.reset()
                vars(item).update(self._sums.get(key, {}))
        with internals.logging_hook(self._module, hook):
            for logs in minibatches:
                self._repeat(logs)
        self._sums.update(
            {
                key: internals.accumulated(item)
                for key, item in results.items()
                if item.meta.fx == hook and item.is_tensor
            }
        )

    def append(self, minibatches: Iterable[Logs], *, hook: str) -> None:
        """Repeats the calls of further minibatches; what was shown stays."""
        with internals.logging_hook(self._module, hook):
            for logs in minibatches:
                self._repeat(logs)

    def _repeat(self, logs: Sequence[Logged]) -> None:
        for note in logs:
            value: Any = note.value
            if note.metric is not None:
                value = self._module.get_submodule(note.metric)
                set_last_result(value, self._tensor(note))
            elif note.dtype is not None:
                value = self._tensor(note)
            if not self._add(note, value):
                self._module.log(note.name, value, **note.options)

    def _add(self, note: Logged, value: Any) -> bool:
        """Adds a value to an earlier one with the same options; False where there is none.

        ``self.log`` checks everything anew in each call, which takes about a millisecond. A
        pipeline would wait for that on every rank and for every minibatch.
        """
        results = internals.logged_values(self._module.trainer)
        if results is None or results.dataloader_idx is not None or isinstance(value, float | int):
            return False
        key = f"{internals.current_hook(self._module)}.{note.name}"
        options = {name: item for name, item in note.options.items() if name != "batch_size"}
        if key not in results or self._options.get(key) != options:
            self._options[key] = options  # self.log compares with what it has
            return False
        results.update_metrics(key, value, note.options.get("batch_size") or 1)
        return True

    def _tensor(self, note: Logged) -> Tensor | None:
        if note.dtype is None:
            return None
        return torch.tensor(note.value, dtype=note.dtype, device=self._module.device)


def _simple(value: Any, metric: str | None) -> bool:
    if isinstance(value, Metric):
        return metric is not None
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


@contextmanager
def _instead_of_log(module: pl.LightningModule, log: Any) -> Iterator[None]:
    object.__setattr__(module, "log", log)
    try:
        yield
    finally:
        object.__delattr__(module, "log")


_REDUCTIONS: Mapping[Any, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    torch.sum: sum,
    "max": max,
    torch.max: max,
    "min": min,
    torch.min: min,
}
"""Ways of ``self.log`` to reduce values other than their mean."""


def merge_logs(parts: Sequence[tuple[int, Logs]]) -> Logs:
    """One minibatch's logs, from those of its microbatches.

    A value is reduced over microbatches by its ``reduce_fx``, as over steps; a mean counts each by
    its samples. What a call of a metric returned is averaged likewise, which counts for a
    step alone: its states are those of all samples.
    """
    if len(parts) == 1:
        return parts[0][1]
    found: dict[tuple[str, int], list[tuple[int, Logged]]] = {}
    for samples, logs in parts:
        calls: dict[str, int] = {}
        for note in logs:
            calls[note.name] = calls.get(note.name, -1) + 1
            found.setdefault((note.name, calls[note.name]), []).append((samples, note))
    return tuple(map(_one, found.values()))


def _one(notes: Sequence[tuple[int, Logged]]) -> Logged:
    """The value of one call of ``self.log``, from those in several microbatches."""
    first = notes[0][1]
    sizes = [note.options.get("batch_size") for _, note in notes]
    options = dict(first.options)
    if None not in sizes:
        options["batch_size"] = sum(size for size in sizes if size is not None)
    weights = [size or samples for size, (samples, _) in zip(sizes, notes, strict=True)]
    values = [note.value for _, note in notes if note.value is not None]
    value: Any = None
    dtype = first.dtype
    if len(values) == len(notes):
        reduce = _REDUCTIONS.get(options.get("reduce_fx", "mean"))
        value = _mean(values, weights) if reduce is None else reduce(values)
        if isinstance(value, float) and dtype is not None and not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
    return Logged(first.name, value, dtype, first.metric, options)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Weighted; of equal values it is that value, without any rounding."""
    if all(value == values[0] for value in values):
        return values[0]
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
