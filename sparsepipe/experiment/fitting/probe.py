"""A probe: ``python -m sparsepipe.experiment.fitting.probe <request>`` takes real training steps.

It is a process of its own, so that what it needs is its own, and what it breaks, too. It answers by
a file; where its memory passes the budget it ends at once and answers by its exit status.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from sparsepipe.errors import SparsePipeError
from sparsepipe.experiment.build import build_data, build_inventory, build_module
from sparsepipe.experiment.callbacks.throughput import batch_size_of
from sparsepipe.experiment.fitting.memory import (
    ResidentPeak,
    limit_allocations,
    prefer_as_victim,
    watch_resident,
)
from sparsepipe.experiment.loaders import adapt_loaders
from sparsepipe.experiment.logs import quiet
from sparsepipe.experiment.measured_device import prepare_device
from sparsepipe.experiment.run import Run
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.experiment.seeding import seed_epoch, seed_model
from sparsepipe.experiment.signals import SignalWatch
from sparsepipe.profiling.activations import fresh
from sparsepipe.runtime.launch import follow_parent

OVER_BUDGET, OUT_OF_MEMORY = 91, 92
"""Exit statuses."""
_SLACK_BYTES = 2**30
"""What may be asked for beyond the budget, and is not used."""
_REFUSALS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
_INSTEAD: dict[str, Any] = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a probe is asked.

    Args:
        config: resolved and checked; of a run with one device.
        batch_size: in place of the configuration's.
        budget_bytes: that may be taken; None: all that a GPU has.
        steps: of training.
        answer: the file to answer by.
        parent: the process that asks, without which there is nobody to answer.
    """

    config: Mapping[str, Any]
    batch_size: int
    budget_bytes: int | None
    steps: int
    answer: Path
    parent: int


class _Batches:
    """Copies of batches as a loader gives them: each new, without kernel maps of an earlier step.

    Args:
        batches: what there was before memory was measured.
    """

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return map(fresh, self._batches)


def main() -> None:
    """Takes the steps of the request given on the command line."""
    request: Request = pickle.loads(Path(sys.argv[1]).read_bytes())
    follow_parent(parent=request.parent)
    prefer_as_victim()
    quiet()
    try:
        answer: int | SparsePipeError = memory_of_steps(request)
    except SparsePipeError as error:
        answer = error
    except (MemoryError, RuntimeError) as error:
        if not _ran_out(error):
            raise
        os._exit(OUT_OF_MEMORY)  # what is left of torch need not be taken apart
    request.answer.write_bytes(pickle.dumps(answer))


def memory_of_steps(request: Request) -> int:
    """The most memory that the steps took: network, gradients, optimizer, activations, batch.

    Raises:
        SparsePipeError: something a user can mend.
    """
    config = {**request.config, "data": _of_size(request.config["data"], request.batch_size)}
    inventory = build_inventory(config)
    run = Run(
        config={**config, "callbacks": {}, "logger": {}},
        directory=RunDir(request.answer.parent),
        inventory=inventory,
        watch=SignalWatch(),
    )
    seed = int(config["seed"])
    seed_model(seed)
    data = build_data(config)
    data.setup("fit")
    adapt_loaders(data, seed=seed)
    seed_epoch(seed, 0)
    count = request.steps * int(config["trainer"]["accumulate_grad_batches"])
    batches = _batches(data.train_dataloader(), size=request.batch_size, count=count)
    device = torch.device("cpu")
    if inventory.accelerator == "cuda":
        device = prepare_device(run.places[0], inventory)
    peak = _limited(device, request.budget_bytes)
    module = build_module(run.config, data)
    trainer = run.trainer([], silent=True, max_steps=request.steps, **_INSTEAD)
    trainer.fit(module, train_dataloaders=_Batches(batches))
    return int(torch.cuda.max_memory_allocated(device)) if peak is None else peak.bytes()


def _of_size(data: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Settings of data that are read by this process itself, whose memory is measured."""
    more = {"num_workers": 0} if "num_workers" in data else {}
    return {**data, "batch_size": batch_size, **more}


def _batches(loader: Any, *, size: int, count: int) -> list[Any]:
    """The first full batches of an epoch, which take turns; where none is, what there is."""
    first = list(islice(iter(loader), count))
    full = [batch for batch in first if batch_size_of(batch) == size]
    return list(islice(cycle(full or first), count))


def _limited(device: torch.device, budget_bytes: int | None) -> ResidentPeak | None:
    """Sets the budget from now on; what measures it, unless a GPU does."""
    if device.type == "cuda":
        if budget_bytes is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / whole), device)
        torch.cuda.reset_peak_memory_stats(device)
        return None
    peak = ResidentPeak()
    assert budget_bytes is not None, "a processor's memory has no end of its own"
    limit_allocations(budget_bytes + budget_bytes // 2 + _SLACK_BYTES)
    watch_resident(peak.before_bytes + budget_bytes, lambda: os._exit(OVER_BUDGET))
    return peak


def _ran_out(error: BaseException) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in _REFUSALS)


if __name__ == "__main__":
    main()
