"""Training steps, epochs with their loader, sparse over dense, whether bits repeat, and memory.

Steps are timed on batches that lie on the device. All else are runs of ``sparsepipe`` as users make
them, of the paper's Tables I and II and its Fig. 8 at ``scale=paper``, on generated shapes and with
epochs that are cut to a few minibatches. On a CPU they are small: a rehearsal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from convolution_peers import backend_of, present
from jobs import Jobs
from pipeline_ranks import on_ranks
from pipeline_workloads import CLASSES, Vgg, fresh, sgd
from records import Row, Rows
from torch.nn import functional as F

from sparsepipe.profiling.timing import Clock, median_and_spread
from sparsepipe.utils.process import multiplying

COLUMNS: Mapping[str, str] = {
    "step_s": "step (s)",
    "shapes_per_s": "shapes/s",
    "over": "over it",
    "epoch_time_s": "epoch (s)",
    "epoch_shapes": "shapes an epoch",
    "inference_shapes_per_s": "inference (shapes/s)",
    "peak_bytes": "memory of a step (bytes)",
    "repeats": "the same bits",
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
_LIMIT_S = 60.0


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """Measures steps, bits and epochs in order of worth.

    Args:
        rows: of the record.
        device: that computes.
        work: directory for data and runs.
    """
    on_cuda = device.type == "cuda"
    ours = [each.name for each in present(rows, ["triton"], on_cuda=on_cuda)] + ["native"]
    for batch in (64, 128):
        for precision in ("bf16", "tf32"):
            found = [_measure_step(rows, device, f"{x} 50³ {batch}", precision) for x in ours]
            _over(rows, f"step 50³ {batch} {precision}: {' over '.join(ours)}", found)
    for resolution in (50, 32):
        for precision in ("bf16", "tf32"):
            dense = _measure_step(rows, device, f"dense {resolution}³", precision)
            for name in ours:
                sparse = _measure_step(rows, device, f"{name} {resolution}³", precision)
                _over(rows, f"step {resolution}³ {precision}: {name} over dense", [sparse, dense])
    jobs, scale = Jobs(work), "paper" if on_cuda else "smoke"
    for resolution, repeated in ((50, ours[:1]), (32, ours[1:])):
        default, native, dense = (
            rows.measure(
                " ".join(["table2", network, f"{resolution}³", *words]),
                partial(_epochs, jobs, network, resolution, scale, *words),
            )
            for network, *words in (("sparse",), ("sparse", "backend=native"), ("dense",))
        )
        _over(rows, f"epoch {resolution}³: sparse over dense", [default, dense])
        _over(rows, f"epoch {resolution}³: sparse over native", [default, native])
        for name in repeated:
            rows.measure(f"two trainings, {name}", partial(_repeated, name, device))


def measure_memory(rows: Rows, *, device: torch.device, work: Path) -> None:
    """Measures memory, largest batches and what else of the paper's tables; see :func:`measure`."""
    jobs = Jobs(work)
    for resolution in (50, 100, 200, 32):
        for network in ("sparse", "dense"):
            name = f"fig8 {network} {resolution}³"
            rows.measure(name, partial(_fig8, jobs, network, resolution))
    for resolution in (50, 32):
        for network in _NETWORKS:
            name = f"largest batch in 11 GB, {network} {resolution}³"
            rows.measure(name, partial(_largest, jobs, network, resolution, _PAPERS_GPU_BYTES))
    rows.measure("table1", lambda: _row_of(jobs.run("experiment=table1", "scale=paper")[0], {}))
    for resolution in (50, 32):
        for network in ("native", "dense"):
            _measure_step(rows, device, f"{network} {resolution}³", "fp32")
        for network in _NETWORKS[2:]:
            name = f"table2 {network} {resolution}³"
            rows.measure(name, partial(_epochs, jobs, network, resolution, "paper"))
    for resolution in (50, 32):
        name = f"largest batch of the device, dense {resolution}³"
        rows.measure(name, partial(_largest, jobs, "dense", resolution, None))


def _over(rows: Rows, name: str, found: Sequence[Row | None]) -> None:
    """Makes a row of the first one's rate over the second one's, if both were measured."""
    rates = [row["shapes_per_s"] for row in found if row]
    if len(rates) == 2:
        rows.measure(name, partial(dict, over=rates[0] / rates[1]))


def _measure_step(rows: Rows, device: torch.device, case: str, precision: str) -> Row | None:
    workload = _workload(case, small=device.type == "cpu")
    name = f"step {' '.join(case.split()[:2])} batch {workload.batch_size} {precision}"
    return rows.measure(name, partial(_step, workload, device, precision))


def _workload(case: str, *, small: bool) -> Vgg:
    """Returns the workload of a case: ``dense`` or the backend of a sparse network, then its grid
    and, unless the paper's counts, its batch, such as ``triton 50³ 64``.
    """
    network, grid, *given = case.split()
    kind, resolution = "dense" if network == "dense" else "sparse", int(grid.rstrip("³"))
    found = Vgg(
        sparse=kind == "sparse",
        depth=16,
        width=1.0,
        resolution=resolution,
        points=4096,
        batch_size=int(given[0]) if given else _BATCHES[kind, resolution],
        backend=backend_of(network) if kind == "sparse" else None,
    )
    return replace(found, width=0.0625, resolution=8, batch_size=2) if small else found


def _step(workload: Vgg, device: torch.device, precision: str) -> Row:
    """Forward, backward and update on batches of the device; kernel maps are made anew."""
    on_cuda = device.type == "cuda"
    step, _ = _training(workload, device, precision)
    with multiplying("high" if precision == "tf32" else "highest"):
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        for number in range(_WARMUPS):
            step(number)
        clock = Clock(device)
        clock.mark()
        for number in range(_STEPS):
            step(number)
            clock.mark()
        middle_s, spread_s = median_and_spread(clock.seconds())
    return {
        "precision": precision,
        "batch": workload.batch_size,
        "step_s": middle_s,
        "step_spread_s": spread_s,
        "shapes_per_s": workload.batch_size / middle_s,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_cuda else None,
    }


@cache
def _inputs(workload: Vgg) -> list[Any]:
    return [workload.input(number) for number in range(2)]


def _training(
    workload: Vgg, device: torch.device, precision: str
) -> tuple[Callable[[int], None], torch.nn.Module]:
    """A step: forward, backward and update on batches of the device, with new kernel maps."""
    network = workload.layers().to(device)
    optimizer = sgd(network.parameters())
    batches = [x.to(device) for x in _inputs(replace(workload, backend=None))]
    label_B = (torch.arange(workload.batch_size) % CLASSES).to(device)

    def step(number: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(network(fresh(batches[number % len(batches)])), label_B)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, network


def _repeated(network: str, device: torch.device) -> Row:
    """Tells whether two trainings, in processes of their own, end with the same bits."""
    workload = _workload(f"{network} 50³ 64", small=device.type == "cpu")
    found = [on_ranks(_bits, 1, workload, device.type, limit_s=_LIMIT_S)[0] for _ in range(2)]
    return {"repeats": found[0] == found[1], "bits": found}


def _bits(rank: int, workload: Vgg, kind: str) -> dict[str, str]:
    """The weights after some steps, as a hash, for each precision."""
    del rank
    found = {}
    for precision in ("bf16", "tf32"):
        step, network = _training(workload, torch.device(kind), precision)
        with multiplying("high" if precision == "tf32" else "highest"):
            for number in range(_STEPS):
                step(number)
        weights = b"".join(value.cpu().numpy().tobytes() for value in network.state_dict().values())
        found[precision] = hashlib.sha256(weights).hexdigest()[:16]
    return found


def _epochs(jobs: Jobs, network: str, resolution: int, scale: str, *words: str) -> Row:
    """Epochs of one of Table II's trainings on one device, cut short."""
    result, _ = jobs.run(
        *_cell(network, resolution, scale),
        "paper/trial=one_device",
        "task.test=false",
        f"trainer.max_epochs={_EPOCHS}",
        f"trainer.limit_train_batches={_EPOCH_SHARE}",
        *words,
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


def _cell(network: str, resolution: int, scale: str = "paper") -> tuple[str, ...]:
    return (
        "experiment=table2",
        f"scale={scale}",
        f"paper/network={network}",
        f"data.resolution={resolution}",
    )


def _row_of(result: Mapping[str, Any], more: Row) -> Row:
    """What the summary shows of a run, and all of it for the ledger."""
    shown = {key: result[key] for key in COLUMNS if result.get(key) is not None}
    return {**shown, **more, "result": dict(result)}
