"""Training steps within a memory budget: a probe for each batch size, and their outcomes."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning.utilities.seed import isolate_rng

from sparsepipe.callbacks.progress import batch_size_of
from sparsepipe.config.build import build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError, HardwareError, SparsePipeError
from sparsepipe.planning.devices import memory_of, prepare_device
from sparsepipe.profiling.activations import fresh
from sparsepipe.runs.lock import scratch
from sparsepipe.runs.out_of_memory import (
    empty_device,
    filled_share,
    kills_since,
    oom_kills,
    ran_out,
)
from sparsepipe.runs.randomness import seed_epoch, seed_model
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.fitting.memory import (
    OUT_OF_MEMORY,
    OVER_BUDGET,
    TOO_FEW_SHAPES,
    ResidentPeak,
    end_beyond,
    limit_allocations,
)
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import read_json, write_json
from sparsepipe.utils.process import set_matmul_precision

log = logging.getLogger(__name__)

Outcome = Literal["fits", "over_budget", "out_of_memory", "killed_for_memory", "too_few_shapes"]
_OUTPUT_LINES = 20
_SLACK_BYTES = 2**30
"""Bytes that may be allocated beyond 1.5 times the budget, since some are never used."""
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
"""Arguments of the Trainer for nothing but training steps; ``max_steps`` is added."""
_OUTCOMES: Mapping[int, Outcome] = {
    OVER_BUDGET: "over_budget",
    OUT_OF_MEMORY: "out_of_memory",
    TOO_FEW_SHAPES: "too_few_shapes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The outcome of a few training steps.

    Attributes:
        batch_size: samples of a minibatch.
        outcome: whether the steps fit, or why not.
        memory_bytes: the most memory that they took at a time; None: they do not fit.
        wall_s: seconds of the whole probe, the start of its process and reading data included.
    """

    batch_size: int
    outcome: Outcome
    memory_bytes: int | None
    wall_s: float

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"


class TooFewShapes(Exception):
    """The data have no full batch of the given size."""


class Prober:
    """Measures the memory of a run's training steps; keeps the outcomes in ``probes.json``.

    Args:
        run: the run.
        budget_bytes: bytes that steps may take: on a GPU, a limit at which it runs out of memory;
            on a CPU, resident memory beyond that before the network was made. None: all free memory
            of a GPU, or a CPU device's memory in the inventory.
        steps: number of training steps of each probe; in step 1, the optimizer has no state yet.
        timeout_s: longest time that a probe's process may take, in seconds.
        isolated: whether each probe is a process of its own; False is only possible on a GPU.
        whole: whether a batch size fails if the data have no full batch; else smaller ones do.
    """

    def __init__(
        self,
        run: ResolvedRun,
        *,
        budget_bytes: float | None,
        steps: int,
        timeout_s: float,
        isolated: bool = True,
        whole: bool = False,
    ) -> None:
        on_gpu = run.inventory.accelerator == "cuda"
        if not isolated and not on_gpu:
            raise ConfigError(
                "task.isolated=false needs a GPU: on a CPU, a step that needs too much memory "
                "would kill the run",
                remedy="leave task.isolated=true, or train on a GPU",
            )
        if budget_bytes is None and not on_gpu:
            budget_bytes = memory_of(run.places[0], run.inventory)
            if budget_bytes is None:
                raise HardwareError(
                    "the inventory does not say how much memory the device has",
                    remedy="set task.budget_bytes",
                )
        self._budget_bytes = None if budget_bytes is None else int(budget_bytes)
        self._timeout_s, self._isolated = timeout_s, isolated
        self._request = {
            "spec": run.spec,
            "budget_bytes": self._budget_bytes,
            "steps": steps,
            "whole": whole,
        }
        self._file = run.directory.path / "probes.json"
        kept = read_json(self._file) if self._file.exists() else []
        self._known = {each["batch_size"]: Probe(**each) for each in kept}

    @property
    def values(self) -> dict[str, Any]:
        """Entries of ``result.json``: the budget, and all probes in the order of batch sizes."""
        probes = [self._known[size] for size in sorted(self._known)]
        return {
            "budget_bytes": self._budget_bytes,
            "probed_batches": [probe.batch_size for probe in probes],
            "probed_outcomes": [probe.outcome for probe in probes],
            "probed_memory_bytes": [probe.memory_bytes for probe in probes],
            "probing_s": sum(probe.wall_s for probe in probes),
        }

    def probe(self, batch_size: int) -> Probe:
        """Returns the probe of a batch size, which is made only if its outcome is not known."""
        if batch_size in self._known:
            return self._known[batch_size]
        started_s = time.monotonic()
        with scratch() as place:
            request = {**self._request, "batch_size": batch_size}
            outcome, memory_bytes = (self._ask if self._isolated else self._try)(request, place)
        most_bytes = float("inf") if self._budget_bytes is None else self._budget_bytes
        if memory_bytes is not None and memory_bytes > most_bytes:  # the watch may have missed it
            outcome, memory_bytes = "over_budget", None
        found = self._known[batch_size] = Probe(
            batch_size=batch_size,
            outcome=outcome,
            memory_bytes=memory_bytes,
            wall_s=time.monotonic() - started_s,
        )
        write_json(self._file, [asdict(self._known[size]) for size in sorted(self._known)])
        memory = "" if memory_bytes is None else f", {memory_bytes / 1e6:,.0f} MB"
        log.info("batch size %d: %s%s (%.1f s)", batch_size, outcome, memory, found.wall_s)
        return found

    def _try(self, request: dict[str, Any], place: Path) -> tuple[Outcome, int | None]:
        """Takes the steps here; restores random states and threads. Returns outcome and bytes."""
        threads = torch.get_num_threads()
        try:
            with isolate_rng():
                return "fits", memory_of_steps(**request, place=place)
        except TooFewShapes:
            return "too_few_shapes", None
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error, filled=filled_share(self._budget_bytes)):
                raise
        finally:
            torch.set_num_threads(threads)
            empty_device()
        empty_device()  # again: until here, the error has held the tensors of its frames
        return "out_of_memory", None

    def _ask(self, request: dict[str, Any], place: Path) -> tuple[Outcome, int | None]:
        """Takes the steps in a new process. Returns outcome and bytes."""
        (place / "parent").write_bytes(pickle.dumps(os.getpid()))
        (place / "request").write_bytes(pickle.dumps({**request, "place": place}))
        kills, steps = oom_kills(), f"training steps of batch size {request['batch_size']}"
        again = "the same command continues the search with the answers that it has"
        try:
            with (place / "output").open("wb") as stream:
                done = subprocess.run(
                    [sys.executable, "-m", "sparsepipe.tasks.fitting.probe", str(place)],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C reaches only us, who end it
                    timeout=self._timeout_s,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise SparsePipeError(
                f"{steps} took longer than task.timeout_s={self._timeout_s:g}: whether they fit is "
                "unknown",
                remedy=f"raise task.timeout_s; {again}",
            ) from None
        code = done.returncode
        if code == 0:
            answer: int | SparsePipeError = pickle.loads((place / "answer").read_bytes())
            if isinstance(answer, SparsePipeError):
                raise answer
            return "fits", answer
        if code in _OUTCOMES:
            return _OUTCOMES[code], None
        if code == -signal.SIGKILL and kills_since(kills):
            told = "the machine ran out of memory, and the kernel ended %s within their budget"
            log.warning(told + ": other processes may use the rest", steps)
            return "killed_for_memory", None
        output = (place / "output").read_text(errors="replace").strip().splitlines()
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise SparsePipeError(
            f"{steps} ended with {end}, so that it is unknown whether they fit:\n"
            + "\n".join(output[-_OUTPUT_LINES:]),
            remedy=f"remove the cause; {again}",
        )


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
    """Takes training steps; returns their peak memory in bytes: network, gradients, optimizer,
    activations, batch.

    The steps use the first full batches of an epoch in turn, or smaller ones if none is full.

    Args:
        spec: the configuration; its data are read by this process, in batches of ``batch_size``.
        batch_size: samples of a minibatch.
        budget_bytes: limit of the memory; None: all of a GPU.
        steps: number of steps.
        whole: whether to raise :class:`TooFewShapes` if no batch is full.
        place: a temporary directory in place of the run's.
    """
    alone = {"num_workers": 0} if "num_workers" in spec.data.arguments else {}
    data_target = spec.data.replace(batch_size=batch_size, **alone)
    spec = spec.replace(data=data_target, callbacks={}, logger={})
    inventory = build_inventory(spec)
    run = ResolvedRun.of(spec, inventory, directory=RunDir(place))
    set_matmul_precision(run.matmul_precision)
    seed = int(spec.seed)
    seed_model(seed)
    data = run.load_data("fit")
    seed_epoch(seed, 0)
    count = steps * int(spec.trainer.accumulate_grad_batches)
    first = list(islice(iter(data.train_dataloader()), count))
    full = [batch for batch in first if batch_size_of(batch) == batch_size]
    if whole and not full:
        raise TooFewShapes
    batches = list(islice(cycle(full or first), count))
    device, peak = torch.device("cpu"), None
    if inventory.accelerator == "cuda":
        device = prepare_device(run.places[0], inventory)
        if budget_bytes is not None:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            share = min(1.0, budget_bytes / total_bytes)
            torch.cuda.set_per_process_memory_fraction(share, device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        assert budget_bytes is not None, "on a CPU, the budget is always known"
        peak = ResidentPeak()
        limit_allocations(budget_bytes + budget_bytes // 2 + _SLACK_BYTES)
        end_beyond(peak.before_bytes + budget_bytes)
    module = run.build_module(data)
    trainer = run.trainer([], silent=True, max_steps=steps, **A_FEW_STEPS)
    trainer.fit(module, train_dataloaders=_FreshBatches(batches))
    return int(torch.cuda.max_memory_allocated(device)) if peak is None else peak.bytes()
