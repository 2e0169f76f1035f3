"""A few real training steps within a budget of memory, and what they take: the work of a probe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from sparsepipe.callbacks.progress import batch_size_of
from sparsepipe.config.build import build_data, build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.planning.devices import prepare_device
from sparsepipe.profiling.activations import fresh
from sparsepipe.runs.randomness import seed_epoch, seed_model
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.fitting.memory import ResidentPeak, end_beyond, limit_allocations
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


class _FreshBatches:
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
    whole: bool,
    place: Path,
) -> int:
    """The most memory, in bytes, that training steps took: network, gradients, optimizer,
    activations, batch.

    Args:
        spec: the configuration, whose data are read by this process, in batches of another size.
        batch_size: samples of a minibatch.
        budget_bytes: limit of the memory; None: all of a GPU.
        steps: how many steps are taken.
        whole: smaller batches, of data with too few shapes, are refused.
        place: directory of the run.

    Raises:
        TooFewShapes: the data have no batch of that size.
    """
    alone = {"num_workers": 0} if "num_workers" in spec.data.arguments else {}
    data_target = spec.data.replace(batch_size=batch_size, **alone)
    spec = spec.replace(data=data_target, callbacks={}, logger={})
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
    device, peak = torch.device("cpu"), None
    if inventory.accelerator == "cuda":
        device = prepare_device(run.places[0], inventory)
        if budget_bytes is not None:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            share = min(1.0, budget_bytes / total_bytes)
            torch.cuda.set_per_process_memory_fraction(share, device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        assert budget_bytes is not None, "a processor's memory has no end of its own"
        peak = ResidentPeak()
        limit_allocations(budget_bytes + budget_bytes // 2 + _SLACK_BYTES)
        end_beyond(peak.before_bytes + budget_bytes)
    module = run.build_module(data)
    trainer = run.trainer([], silent=True, max_steps=steps, **A_FEW_STEPS)
    trainer.fit(module, train_dataloaders=_FreshBatches(batches))
    return int(torch.cuda.max_memory_allocated(device)) if peak is None else peak.bytes()


def first_batches(loader: Any, *, size: int, count: int, whole: bool) -> list[Any]:
    """The first full batches of an epoch, which take turns; smaller ones if none is full.

    Raises:
        TooFewShapes: none is full, and batches have to be ``whole``.
    """
    first = list(islice(iter(loader), count))
    full = [batch for batch in first if batch_size_of(batch) == size]
    if whole and not full:
        raise TooFewShapes
    return list(islice(cycle(full or first), count))
