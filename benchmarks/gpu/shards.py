"""One sample over several ranks that share one device over gloo: how much memory each needs.

Ranks take turns on the device, so that no speedup is to be had. What a rank needs is what it would
need on a device of its own, but for the driver's share, which is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pipeline_ranks import on_ranks
from records import Row, Rows
from spatial_steps import step_of
from torch import nn

from sparsepipe.models import cnn3d, convnext_xl
from sparsepipe.runtime.collectives import halo, process_group
from sparsepipe.spatial import Grid, grid, spatialize
from sparsepipe.spatial.grid import best_grid

COLUMNS: Mapping[str, str] = {
    "grid": "grid",
    "peak_bytes": "largest memory of a rank (bytes)",
    "over_one_rank": "of that of one rank",
    "sent_bytes": "halos sent by a rank in a step (bytes)",
    "step_s": "step, ranks in turn (s)",
}
CLASSES = 10
_LIMIT_S = 120.0
_STEPS = 2
_NETWORKS: Mapping[str, tuple[Callable[..., nn.Module], int]] = {
    "convnext_xl": (partial(convnext_xl, stochastic_depth=0.0), 3),
    "cnn3d": (cnn3d, 1),
}
"""Of each name: the network, and the channels of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training step of one sample.

    Args:
        network: one of the names above.
        size: of the sample.
        ranks: that share it.
        checkpointing: compute activations again.
    """

    network: str
    size: tuple[int, ...]
    ranks: int
    checkpointing: bool = False

    def __str__(self) -> str:
        again = ", checkpointing" if self.checkpointing else ""
        return f"{self.network} {'x'.join(map(str, self.size))} on {self.ranks}{again}"


def cases() -> Iterator[Case]:
    """Widths as of Figs. 3 and 4 of NVIDIA's and NIO's study, on 1 to 8 ranks; growing volumes."""
    for width in (1024, 2048, 4096, 8192):
        for ranks in (1, 2, 4, 8):
            for checkpointing in (False, True) if width in (1024, 8192) else (False,):
                yield Case(
                    network="convnext_xl",
                    size=(512, width),
                    ranks=ranks,
                    checkpointing=checkpointing,
                )
    for side in (128, 256, 384):
        for ranks in (1, 4, 8):
            yield Case(network="cnn3d", size=(side,) * 3, ranks=ranks)


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """A row for each case; ranks start anew for each.

    Args:
        rows: of the record.
        device: a CUDA device, which the ranks share.
        work: not used.
    """
    alone: dict[Any, int] = {}
    for case in cases():
        key = case.network, case.size, case.checkpointing
        row = rows.measure(str(case), partial(_largest, case, alone.get(key), device.type))
        if row is not None and case.ranks == 1:
            alone[key] = row["peak_bytes"]


def _largest(case: Case, alone: int | None, kind: str) -> Row:
    """Of the rank that needs most."""
    found = on_ranks(_rank, case.ranks, case, kind, limit_s=_LIMIT_S)
    peak = max(each["peak_bytes"] for each in found)
    return {
        "grid": " x ".join(map(str, best_grid(case.size, case.ranks))),
        "peak_bytes": peak,
        "over_one_rank": peak / alone if alone and case.ranks > 1 else None,
        "sent_bytes": max(each["sent_bytes"] for each in found),
        "step_s": max(each["step_s"] for each in found),
    }


def _rank(rank: int, case: Case, kind: str) -> dict[str, Any]:
    make, channels = _NETWORKS[case.network]
    with torch.device(kind):
        torch.manual_seed(0)
        model = make(CLASSES, in_channels=channels, checkpointing=case.checkpointing)
        x, label = torch.rand(1, channels, *case.size), torch.tensor([3])
    shared = case.ranks > 1
    if shared:
        process_group.join("gloo", timeout_s=_LIMIT_S)
        places = Grid(best_grid(case.size, case.ranks))
        x = places.shard(x).clone()
        spatialize(model, places)
    step = step_of(model, x, label, sums=shared)
    step()  # which makes the optimizer's state
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with _counted() as sizes:
        began_s = time.perf_counter()
        for _ in range(_STEPS):
            step()
            torch.cuda.synchronize()
            if shared:
                dist.barrier()
        step_s = (time.perf_counter() - began_s) / _STEPS
    if shared:
        process_group.leave()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "sent_bytes": sum(sizes) // _STEPS, "step_s": step_s}


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Sizes in bytes of the messages between shards that this rank sends meanwhile."""
    sizes: list[int] = []
    start = halo.start_messages

    def counting(sends: Any, receives: Any, **more: Any) -> Any:
        sizes.extend(tensor.nbytes for _, tensor in sends)
        return start(sends, receives, **more)

    with patch.object(grid, "start_messages", counting):
        yield sizes
