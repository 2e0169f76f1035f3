"""A few real training steps within a budget of memory, and what they take: the work of a probe."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from sparsepipe.callbacks.progress import batch_size_of
from sparsepipe.config.build import build_data, build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.target import Target
from sparsepipe.planning.devices import prepare_device
from sparsepipe.profiling.activations import fresh
from sparsepipe.runs.randomness import seed_epoch, seed_model
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.fitting.memory import (
    OVER_BUDGET,
    ResidentPeak,
    limit_allocations,
    status_bytes,
    watch_resident,
)
from sparsepipe.tasks.loaders import adapt_loaders
from sparsepipe.tasks.task import ResolvedRun


class TooFewShapes(Exception):
    """The data have no batch of the given size."""


_SLACK_BYTES = 2**30
"""Unused allocations that are allowed beyond the budget."""
A_FEW_STEPS: dict[str, Any] = {
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": None,
    "limit_val_batches": 0,
    "overfit_batches": 0.0,
    "val_check_interval": None,
    "fast_dev_run": False,
    "reload_dataloaders_every_n_epochs": 0,
    "profiler": None,
    "enable_checkpointing": False,
}
"""Arguments of the Trainer: a few steps, and nothing beside them."""


class _Batches:
    """Copies of a loader's batches, each without the kernel maps of an earlier step."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return map(fresh, self._batches)


def memory_of_steps(
    spec: RunSpec,
    *,
    batch_size: int,
    budget_bytes: int | None,
    steps: int,
    isolated: bool,
    whole: bool,
    place: Path,
) -> int:
    """The most memory, in bytes, that training steps took: network, gradients, optimizer,
    activations, batch. Without ``budget_bytes`` all of a GPU counts; ``whole`` refuses smaller
    batches (TooFewShapes). The memory in use is recorded in the file ``seen`` in ``place``.
    """
    spec = spec.replace(data=_with_batch_size(spec.data, batch_size), callbacks={}, logger={})
    inventory = build_inventory(spec)
    run = ResolvedRun.of(spec, inventory, directory=RunDir(place))
    seed = int(spec.seed)
    seed_model(seed)
    data = build_data(spec)
    data.setup("fit")
    adapt_loaders(data, seed=seed)
    seed_epoch(seed, 0)
    count = steps * int(spec.trainer.accumulate_grad_batches)
    batches = first_batches(data.train_dataloader(), size=batch_size, count=count, whole=whole)
    device = torch.device("cpu")
    if inventory.accelerator == "cuda":
        device = prepare_device(run.places[0], inventory)
    # Without isolation the host's memory is that of the whole run, which has no watch.
    seen = place / "seen" if isolated or device.type == "cpu" else None
    peak = _limited(device, budget_bytes, seen)
    module = run.build_module(data)
    trainer = run.trainer([], silent=True, max_steps=steps, **A_FEW_STEPS)
    trainer.fit(module, train_dataloaders=_Batches(batches))
    return int(torch.cuda.max_memory_allocated(device)) if peak is None else peak.bytes()


def _with_batch_size(data: Target, batch_size: int) -> Target:
    """Data that this process, whose memory is measured, reads itself."""
    more = {"num_workers": 0} if "num_workers" in data.arguments else {}
    return data.replace(batch_size=batch_size, **more)


def first_batches(loader: Any, *, size: int, count: int, whole: bool) -> list[Any]:
    """The first full batches of an epoch, which take turns; where none is, what there is.

    Raises:
        TooFewShapes: none is, and they have to be whole.
    """
    first = list(islice(iter(loader), count))
    full = [batch for batch in first if batch_size_of(batch) == size]
    if whole and not full:
        raise TooFewShapes
    return list(islice(cycle(full or first), count))


def _limited(
    device: torch.device, budget_bytes: int | None, seen: Path | None
) -> ResidentPeak | None:
    """Sets the budget from now on; what measures it, unless a GPU does."""
    if device.type == "cuda":
        if seen is not None:  # its host's memory may run out, which nothing limits
            watch_resident(math.inf, lambda: None, grown=_noting(seen))
        if budget_bytes is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / whole), device)
        torch.cuda.reset_peak_memory_stats(device)
        return None
    peak = ResidentPeak()
    assert seen is not None
    assert budget_bytes is not None, "a processor's memory has no end of its own"
    limit_allocations(budget_bytes + budget_bytes // 2 + _SLACK_BYTES)
    watch_resident(
        peak.before_bytes + budget_bytes,
        lambda: os._exit(OVER_BUDGET),
        grown=_noting(seen),
    )
    return peak


def _noting(path: Path) -> Callable[[int], object]:
    """Notes what is resident, and what was at first, where it is left if this process is killed."""
    before_bytes = status_bytes("VmRSS")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return lambda resident_bytes: os.pwrite(
        descriptor, f"{resident_bytes:020d} {before_bytes:020d}".encode(), 0
    )
