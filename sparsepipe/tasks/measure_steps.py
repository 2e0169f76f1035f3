"""The task ``measure_steps``: memory and time of training steps for samples of several sizes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import pytorch_lightning as pl
import torch
from pydantic import Field
from typing_extensions import override

from sparsepipe.callbacks.stop import stop_if_requested
from sparsepipe.config.build import build_data, ready_data
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError
from sparsepipe.profiling.memory import Alive
from sparsepipe.profiling.timing import Clock
from sparsepipe.runs.out_of_memory import empty_device, filled_share, of_machine, ran_out
from sparsepipe.runs.randomness import seed_epoch, seed_model
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.fitting.prober import A_FEW_STEPS
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import read_mapping, write_json

log = logging.getLogger(__name__)

Size = tuple[int, ...]


class OverBudget(Exception):
    """Tensors in a training step take more bytes than the budget allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSteps(Task):
    """Takes training steps on samples of growing size; records memory and time of the worst rank.

    On a CPU, memory is what :class:`~sparsepipe.profiling.memory.Alive` counts, which includes
    parameters and buffers of messages, but neither the sample that a loader reads nor temporary
    buffers of kernels. On a GPU, it is the peak of torch's allocator.

    A budget is enforced. On CPUs, a single rank ends a step as soon as it exceeds the budget;
    several ranks compare their peaks with it after the steps. A GPU's allocator gets no more than
    the budget, and the run ends with the first size that exceeds it. A file in the run's directory
    keeps the results of each size, so that an interrupted run can continue.

    ``conf/task/measure_steps.yaml`` describes the settings.
    """

    sizes: list[list[int]] | None = None
    steps: Annotated[int, Field(ge=1, le=1000)] = 2
    timed_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    budget_bytes: Annotated[float, Field(ge=1, le=1e15)] | None = None

    def run(self, run: ResolvedRun) -> None:
        """Measures the sizes until one runs out of memory, and writes the results."""
        measured: list[Mapping[str, Any]] = []
        for size in self._all_sizes(run.spec):
            if measured and measured[-1]["peak_bytes"] is None:
                break  # a larger one would run out of memory as well
            path = run.directory.path / f"steps_{'x'.join(map(str, size))}.json"
            if path.exists():  # an earlier process has measured it
                measured.append(read_mapping(path))
                continue
            sized = replace(run, spec=with_size(run.spec, size))
            found = {"size": list(size), **self._measured(sized, size, path)}
            stop_if_requested(run.watch)
            measured.append(found)
            if process_group.rank() == 0:
                write_json(path, found)
                log.info("%s", _line(found))
        write_result(run, {**outcome(measured), "budget_bytes": self._most_bytes})

    def prepare(self, run: ResolvedRun) -> str:
        """Generates or opens the samples of all sizes; returns their fingerprints."""
        sizes = self._all_sizes(run.spec)
        return " ".join(ready_data(with_size(run.spec, size)) for size in sizes)

    @property
    def _most_bytes(self) -> int | None:
        return None if self.budget_bytes is None else int(self.budget_bytes)

    def _all_sizes(self, spec: RunSpec) -> list[Size]:
        if self.sizes is not None:
            return [tuple(size) for size in self.sizes]
        return [tuple(build_data(spec).sample_sizes)]  # type: ignore[attr-defined]

    def _measured(self, run: ResolvedRun, size: Size, path: Path) -> Mapping[str, Any]:
        """Returns the values for the file of a size; memory is that of the rank that needs most."""
        on_gpu, over = run.inventory.accelerator == "cuda", False
        try:
            if self.budget_bytes is not None and not on_gpu and run.ranks == 1:
                try:
                    with Limited(self.budget_bytes):
                        _fit(run, [], steps=self.steps)
                except OverBudget:
                    over = True
            own = _counted(run, steps=self.steps, budget_bytes=self.budget_bytes)
            everyone = process_group.gather_objects(own)
        except (MemoryError, RuntimeError) as error:
            filled = filled_share(self._most_bytes) if on_gpu else 0.0
            if not on_gpu or of_machine(error) or not ran_out(error, filled=filled):
                raise
            lost = {"peak_bytes": None, "fits": False, "limited_by": "out_of_memory"}
            if run.ranks > 1:  # the others wait for this one: the run has to end
                write_json(path, {"size": list(size), **lost})
                raise
            return lost
        finally:
            if on_gpu:
                empty_device()
        most = {key: max(each[key] for each in everyone) for key in ("peak_bytes", "saved_bytes")}
        over = over or (self.budget_bytes is not None and most["peak_bytes"] > self.budget_bytes)
        values = {**own, **most, "fits": not over, "limited_by": "over_budget" if over else None}
        if self.timed_steps and not over:
            ends = _StepEnds()
            _fit(run, [ends], steps=self.timed_steps + 1)
            assert ends.clock is not None
            # The slowest rank counts; the first step, before the clock's first mark, does not.
            own_s = median(ends.clock.seconds())
            values["step_s"] = max(process_group.gather_objects(own_s))
        return values


def outcome(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns ``result.json`` entries: all sizes, the largest that fits, the next, which fails."""
    largest = next((each for each in reversed(measured) if each["fits"]), None)
    after = 0 if largest is None else measured.index(largest) + 1
    refused = measured[after] if after < len(measured) else None
    return {
        "measured_sizes": list(measured),
        "largest_size": None if largest is None else largest["size"],
        "refused_size": None if refused is None else refused["size"],
        "limited_by": None if refused is None else refused["limited_by"],
        "step_memory_bytes": None if largest is None else largest["peak_bytes"],
    }


def with_size(spec: RunSpec, size: Size) -> RunSpec:
    """Returns the configuration with samples of this size, without workers, callbacks, loggers."""
    keys = ("data.source.sizes", "data.common.source.sizes")  # the latter for domains
    key = next((key for key in keys if key in spec.flat()), None)
    if key is None:
        raise ConfigError(
            "task=measure_steps changes data.source.sizes, which these data do not have",
            remedy="choose data=signals, images, volumes or image_domains",
        )
    workers = f"{key.removesuffix('source.sizes')}num_workers"
    return spec.replace({key: list(size), workers: 0}, callbacks={}, logger={})


class Limited(Alive):  # type: ignore[no-untyped-call]
    """Raises :class:`OverBudget` as soon as the tensors alive take more than ``most_bytes``."""

    def __init__(self, most_bytes: float) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    @override
    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        found = super().__torch_dispatch__(*args, **kwargs)
        if self.bytes > self._most_bytes:
            raise OverBudget
        return found


@dataclass(eq=False)
class _Watched(pl.Callback):
    """Records the bytes that the forward pass keeps for the backward pass, and the losses."""

    alive: Callable[[], int]  # returns the bytes of the tensors that are alive
    saved_bytes: int | None = None  # of the first step, when no gradients exist yet
    grid: list[int] = field(default_factory=list)  # its shape; empty without one
    losses: list[float] = field(default_factory=list)
    _before: int = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        grid = getattr(trainer.strategy, "grid", None)
        self.grid = [] if grid is None else list(grid.shape)

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._before = self.alive()

    @override
    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        if self.saved_bytes is None:
            self.saved_bytes = self.alive() - self._before

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def _counted(run: ResolvedRun, *, steps: int, budget_bytes: float | None) -> dict[str, Any]:
    """Takes ``steps`` steps; returns this rank's peak bytes, and the records of a ``_Watched``."""
    if run.inventory.accelerator == "cuda":
        torch.cuda.set_device(run.own_device)
        watched = _Watched(torch.cuda.memory_allocated)
        if budget_bytes is not None:
            whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / whole))
        torch.cuda.reset_peak_memory_stats()
        _fit(run, [watched], steps=steps)
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        with Alive() as alive:
            watched = _Watched(lambda: alive.bytes)
            _fit(run, [watched], steps=steps)
        peak_bytes = alive.peak_bytes
    return {
        "peak_bytes": peak_bytes,
        "saved_bytes": watched.saved_bytes,
        "grid": watched.grid,
        "losses": watched.losses,
    }


class _StepEnds(pl.Callback):
    """Marks the end of each step on :attr:`clock`."""

    def __init__(self) -> None:
        self.clock: Clock | None = None

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.clock = self.clock or Clock(trainer.strategy.root_device)
        self.clock.mark()


def _fit(run: ResolvedRun, callbacks: list[pl.Callback], *, steps: int) -> None:
    gc.collect()
    seed = int(run.spec.seed)
    seed_model(seed)
    data = run.load_data("fit")
    module = run.build_module(data)
    trainer = run.trainer(callbacks, silent=True, max_steps=steps, **A_FEW_STEPS)
    seed_epoch(seed, 0)
    trainer.fit(module, datamodule=data)


def _line(found: Mapping[str, Any]) -> str:
    size = f"samples of {' x '.join(map(str, found['size']))} elements"
    if found["peak_bytes"] is None:
        return f"{size}: {found['limited_by'].replace('_', ' ')}"
    over = "" if found["fits"] else ", over the budget"
    step = f", {found['step_s']:.3f} s a step" if "step_s" in found else ""
    return f"{size}: {found['peak_bytes'] / 1e6:,.1f} MB{over}{step}"
