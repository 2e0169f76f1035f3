"""A pipeline of two ranks that share one device over gloo: whether it is right, what it costs.

Both ranks compute on the same device, so that no speedup is to be had: what a pipeline adds to the
time of one process is the price of its transport through pinned host memory and of its turns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pipeline_ranks import on_ranks
from pipeline_training import Way, fit, train
from pipeline_workloads import Vgg
from records import Row, Rows
from torch import Tensor

from sparsepipe.runtime.bandwidth import Benchmark, TimingBudget, time_pairs
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan

COLUMNS: Mapping[str, str] = {
    "minibatch_s": "minibatch (s)",
    "shapes_per_s": "shapes/s",
    "over_one_process": "time over one process",
    "off_one_process": "weights off one process's, over what training moved",
    "sent_bytes": "sent a minibatch (bytes)",
    "message_bytes": "message (bytes)",
    "one_way_s": "one way (s)",
    "bytes_per_s": "bytes/s",
    "both_ways_bytes_per_s": "bytes/s, both ways at once",
    "latency_s": "latency (s)",
}

_PLAN = Plan.of(config="1-1", cuts=[24], num_layers=52)
"""The paper's cut of sparse VGG16-BN (section 4)."""
_ONE = Way(name="one process", ranks=1)
_ASYNCHRONOUS = Way(name="asynchronous", ranks=2, plan=_PLAN)
_SYNCHRONOUS = replace(_ASYNCHRONOUS, name="1F1B, 4 microbatches", schedule="1f1b", microbatches=4)
_WHOLE = replace(_SYNCHRONOUS, name="1F1B, whole minibatches", microbatches=1)
_TIMED = Vgg(sparse=True, depth=16, width=1.0, resolution=50, points=4096, batch_size=32)
_COMPARED = replace(_TIMED, width=0.25, resolution=32, batch_size=8, dropout=0.0)
"""Small, and without draws, which a pipeline keys by minibatch and one process does not."""
_MINIBATCHES, _EPOCHS = 12, 2
_SIZES_BYTES = (2**20, 2**24, 2**26)
_LIMIT_S = 120.0


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """One process, then two ranks, and the messages between them.

    Args:
        rows: of the record.
        device: a CUDA device, which the ranks share.
        work: directory for the weights of a rank.
    """
    one = rows.measure("one process", partial(_told, _TIMED, _ONE, device.type))
    two = rows.measure("two ranks", partial(_two_ranks, work, device.type))
    if one is None or two is None:
        return
    for way in (_ASYNCHRONOUS, _SYNCHRONOUS):
        rows.measure(way.name, partial(_beside, two["rows"][way.name], one))
    rows.measure(_WHOLE.name, lambda: two["equality"])
    for sending in two["sendings"]:
        rows.measure(f"message of {sending['message_bytes'] / 2**20:g} MiB", partial(dict, sending))


def _told(workload: Vgg, way: Way, kind: str) -> dict[str, Any]:
    """How fast this process trains, as one of the ranks of ``way``."""
    trained = train(0, workload, _on(way, kind), _MINIBATCHES, _EPOCHS)
    minibatches = _MINIBATCHES * _EPOCHS
    sent = sum(payload for _, payload, _ in trained.sent.values())
    return {
        "minibatch_s": trained.last.steady_s,
        "shapes_per_s": workload.batch_size / trained.last.steady_s,
        "sent_bytes": sent // minibatches,
        "peak_bytes": torch.cuda.max_memory_allocated() if kind == "cuda" else None,
    }


def _on(way: Way, kind: str) -> Way:
    return replace(way, accelerator="gpu" if kind == "cuda" else "cpu")


def _two_ranks(work: Path, kind: str) -> Row:
    """What all measurements of two ranks found; in one start of processes, which costs most."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / "weights.pt"
    first, second = on_ranks(_rank, 2, file, kind, limit_s=_LIMIT_S)
    told = {
        name: {**row, "sent_bytes": row["sent_bytes"] + second["rows"][name]["sent_bytes"]}
        for name, row in first["rows"].items()
    }
    equality = _equality(torch.load(file, weights_only=True), _weights(_ONE, kind))
    return {"rows": told, "equality": equality, "sendings": first["sendings"]}


def _rank(rank: int, file: Path, kind: str) -> dict[str, Any]:
    if kind == "cuda":
        # A node of its own: Lightning gives no device to two ranks of one node.
        os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank))
    told = {way.name: _told(_TIMED, way, kind) for way in (_ASYNCHRONOUS, _SYNCHRONOUS)}
    weights = _weights(_WHOLE, kind)
    if rank == 0:
        torch.save(weights, file)
    return {"rows": told, "sendings": _sendings(torch.device(kind))}


def _weights(way: Way, kind: str) -> dict[str, Tensor]:
    """Parameters and statistics after a short training, on the host."""
    _, module = fit(0, _COMPARED, _on(way, kind), 6, 1)
    return {name: value.cpu() for name, value in module.state_dict().items()}


def _sendings(device: torch.device) -> list[dict[str, Any]]:
    """How long messages take from device memory to device memory, by way of the host."""
    process_group.join("gloo", timeout_s=_LIMIT_S)
    effort = TimingBudget(repeats=20, warmups=3, most_s=2.0, timeout_s=_LIMIT_S)
    bench = Benchmark(effort, device=device)
    found = time_pairs(bench, [(0, 1)], _SIZES_BYTES)
    bench.close()
    one_way = [sending for sending in found if not sending.both_ways]
    both = {sending.size_bytes: sending.bytes_per_s for sending in found if sending.both_ways}
    return [
        {
            "message_bytes": sending.size_bytes,
            "one_way_s": sending.seconds,
            "latency_s": sending.latency_s,
            "bytes_per_s": sending.bytes_per_s,
            "both_ways_bytes_per_s": both.get(sending.size_bytes),
        }
        for sending in one_way
    ]


def _beside(row: Row, one: Row) -> Row:
    return {**row, "over_one_process": row["minibatch_s"] / one["minibatch_s"]}


def _equality(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Row:
    """How far a pipeline's weights and statistics are from those of a plain Trainer.

    The norm of the difference over that of what training has changed.
    """
    start = _COMPARED.layers().state_dict()
    names = [name for name, value in start.items() if value.is_floating_point()]
    off = torch.cat([_flat(found[f"layers.{n}"]) - _flat(expected[f"layers.{n}"]) for n in names])
    moved = torch.cat([_flat(expected[f"layers.{n}"]) - _flat(start[n]) for n in names])
    return {"off_one_process": float(off.norm() / moved.norm()), "compared": len(names)}


def _flat(value: Tensor) -> Tensor:
    return value.double().flatten()
