"""Training steps, epochs with their loader, memory and largest batches, sparse and dense.

Steps are timed on batches that lie on the device. All else are runs of ``sparsepipe`` as users make
them, of the paper's Tables I and II and its Fig. 8 at ``scale=paper``, on generated shapes and with
epochs that are cut to a few minibatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from jobs import Jobs
from machine import multiplying
from pipeline_workloads import CLASSES, Vgg, fresh, sgd
from records import Row, Rows
from torch.nn import functional as F

from sparsepipe.profiling.timing import Clock, median_and_spread

COLUMNS: Mapping[str, str] = {
    "step_s": "step (s)",
    "shapes_per_s": "shapes/s",
    "epoch_time_s": "epoch (s)",
    "epoch_shapes": "shapes an epoch",
    "inference_shapes_per_s": "inference (shapes/s)",
    "peak_bytes": "memory of a step (bytes)",
    "largest_batch": "largest batch",
    "refused_batch": "refused",
    "budget_bytes": "budget (bytes)",
    "flops_per_s": "fp32 FLOP/s",
    "copied_bytes_per_s": "copied bytes/s",
    "fits": "fits",
}
_EPOCH_SHARE = 0.64
"""Of the training split: the same for all, so that a report sets them beside each other."""
_EPOCHS = 3
_PAPERS_GPU_BYTES = 11e9
_BATCHES = {("dense", 32): 128, ("dense", 50): 32, ("sparse", 32): 256, ("sparse", 50): 128}
"""The paper's, a device (Table II)."""
_NETWORKS = ("sparse", "dense", "sparse_p050", "sparse_p025")
_WARMUPS, _STEPS = 3, 10


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """All rows, in order of worth.

    Args:
        rows: of the record.
        device: a CUDA device.
        work: directory for data and runs.
    """
    for (network, resolution), batch in _BATCHES.items():
        _measure_steps(rows, device, network, resolution, batch)
    jobs = Jobs(work)
    rows.measure("table1", lambda: _row_of(jobs.run("experiment=table1", "scale=paper")[0], {}))
    for resolution in (50, 32):
        for network in _NETWORKS:
            name = f"table2 {network} {resolution}³"
            rows.measure(name, partial(_epochs, jobs, network, resolution))
    for resolution in (50, 100, 200, 32):
        for network in ("sparse", "dense"):
            name = f"fig8 {network} {resolution}³"
            rows.measure(name, partial(_fig8, jobs, network, resolution))
    for resolution in (50, 32):
        for network in _NETWORKS:
            name = f"largest batch in 11 GB, {network} {resolution}³"
            rows.measure(name, partial(_largest, jobs, network, resolution, _PAPERS_GPU_BYTES))
    for resolution in (50, 32):
        name = f"largest batch of the device, dense {resolution}³"
        rows.measure(name, partial(_largest, jobs, "dense", resolution, None))


def _measure_steps(
    rows: Rows, device: torch.device, network: str, resolution: int, batch: int
) -> None:
    workload = Vgg(
        sparse=network == "sparse",
        depth=16,
        width=1.0,
        resolution=resolution,
        points=4096,
        batch_size=batch,
    )
    inputs = cache(lambda: [workload.input(number) for number in range(2)])
    for precision in ("fp32", "tf32", "bf16"):
        name = f"step {network} {resolution}³ batch {batch} {precision}"
        rows.measure(name, partial(_step, workload, inputs, device, precision))


def _step(
    workload: Vgg, inputs: Callable[[], Sequence[Any]], device: torch.device, precision: str
) -> Row:
    """Forward, backward and update on batches of the device; kernel maps are made anew."""
    network = workload.layers().to(device)
    optimizer = sgd(network.parameters())
    batches = [x.to(device) for x in inputs()]
    label_B = (torch.arange(workload.batch_size) % CLASSES).to(device)

    def step(number: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(network(fresh(batches[number % len(batches)])), label_B)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with multiplying(tf32=precision == "tf32"):
        times_s = _timed(step, device)
    middle_s, spread_s = median_and_spread(times_s)
    return {
        "precision": precision,
        "batch": workload.batch_size,
        "step_s": middle_s,
        "step_spread_s": spread_s,
        "shapes_per_s": workload.batch_size / middle_s,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
    }


def _timed(step: Callable[[int], None], device: torch.device) -> list[float]:
    """Times of single steps after some that warm up, by events of the device."""
    torch.cuda.reset_peak_memory_stats(device)
    for number in range(_WARMUPS):
        step(number)
    clock = Clock(device)
    clock.mark()
    for number in range(_STEPS):
        step(number)
        clock.mark()
    return clock.seconds()


def _epochs(jobs: Jobs, network: str, resolution: int) -> Row:
    """Epochs of one of Table II's trainings on one device, cut short; TF32 as torch has it."""
    result, _ = jobs.run(
        *_cell(network, resolution),
        "paper/trial=one_device",
        "task.test=false",
        f"trainer.max_epochs={_EPOCHS}",
        f"trainer.limit_train_batches={_EPOCH_SHARE}",
    )
    shapes = result["steps"] // _EPOCHS * result["data.batch_size"]
    told = {"epoch_shapes": shapes, "shapes_per_s": shapes / result["epoch_time_s"]}
    return _row_of(result, told)


def _fig8(jobs: Jobs, network: str, resolution: int) -> Row:
    """Whether a step fits into the device, what it takes, and how fast the network infers."""
    result, _ = jobs.run(
        "experiment=fig8",
        "scale=paper",
        f"paper/network={network}",
        f"data.resolution={resolution}",
        "task.isolated=false",
        "task.gallery=0",
        "task.timed_batches=5",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=4",
        "trainer.limit_test_batches=2",
    )
    # Its epoch is of four minibatches, the first ones of all: no time to show.
    return _row_of(result, {"peak_bytes": result["step_memory_bytes"], "epoch_time_s": None})


def _largest(jobs: Jobs, network: str, resolution: int, budget_bytes: float | None) -> Row:
    """The largest batch, to a tenth, whose training step fits."""
    budget = [] if budget_bytes is None else [f"task.budget_bytes={budget_bytes:.0f}"]
    start = 16 if network == "dense" and budget_bytes else 128
    result, _ = jobs.run(
        *_cell(network, resolution),
        "paper/trial=largest_batch",
        "task.isolated=false",
        f"task.start={start}",
        "task.precision=0.1",
        *budget,
    )
    return _row_of(result, {"peak_bytes": result["step_memory_bytes"]})


def _cell(network: str, resolution: int) -> tuple[str, ...]:
    return (
        "experiment=table2",
        "scale=paper",
        f"paper/network={network}",
        f"data.resolution={resolution}",
    )


def _row_of(result: Mapping[str, Any], more: Row) -> Row:
    """What the summary shows of a run, and all of it for the ledger."""
    shown = {key: result[key] for key in COLUMNS if result.get(key) is not None}
    return {**shown, **more, "result": dict(result)}
