"""Domains over ranks that share one device over gloo: how much memory each rank needs.

Ranks take turns on the device, so that no speedup is to be had. What a rank needs is what it would
need on a device of its own, but for the driver's share, which is not counted. One rank has all
domains, more have one each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from domains import batch_of, module_of
from pipeline_ranks import on_ranks
from records import Row, Rows
from torch.utils.data import DataLoader
from typing_extensions import override

from sparsepipe.strategies import DomainStrategy

COLUMNS: Mapping[str, str] = {
    "peak_bytes": "largest memory of a rank (bytes)",
    "over_one_target": "of that of one target, over ranks",
    "step_s": "step, ranks in turn (s)",
}
SAMPLES = 4
"""Of each domain in a minibatch."""
_LIMIT_S = 120.0
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Training steps on images of one labelled domain and of targets.

    Args:
        targets: how many.
        side: of the images, in pixels.
        ranks: one, or as many as domains.
    """

    targets: int
    side: int
    ranks: int

    @property
    def domains(self) -> list[str]:
        return ["source", *(f"target_{number}" for number in range(self.targets))]

    def __str__(self) -> str:
        where = "one process" if self.ranks == 1 else "a rank each"
        return f"1 + {self.targets} domains, {self.side} x {self.side}, {where}"


def cases() -> list[Case]:
    """Of Fig. 7 of Tsaris and Hinkle's study, and all domains of 1 + 7 in one process."""
    return [
        Case(targets=targets, side=side, ranks=ranks)
        for side in (256, 512, 1024)
        for targets, ranks in ((1, 1), (7, 1), (1, 2), (4, 5), (7, 8))
    ]


def measure(rows: Rows, *, device: torch.device, work: Path) -> None:
    """A row for each case; ranks start anew for each.

    Args:
        rows: of the record.
        device: a CUDA device, which the ranks share.
        work: not used.
    """
    of_one_target: dict[int, int] = {}
    for case in cases():
        row = rows.measure(str(case), partial(_largest, case, of_one_target.get(case.side)))
        if row is not None and case.ranks == 2:
            of_one_target[case.side] = row["peak_bytes"]


def _largest(case: Case, of_one_target: int | None) -> Row:
    """Of the rank that needs most."""
    found = on_ranks(_rank, case.ranks, case, limit_s=_LIMIT_S)
    peak = max(each["peak_bytes"] for each in found)
    over = peak / of_one_target if of_one_target and case.ranks > 1 else None
    step_s = max(each["step_s"] for each in found)
    return {"peak_bytes": peak, "over_one_target": over, "step_s": step_s}


class _Steps(pl.Callback):
    """Counts from behind the first step, which makes the optimizer's state."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self.step_s = 0.0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._began_s = time.perf_counter()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.cuda.synchronize()
        self.step_s = (time.perf_counter() - self._began_s) / _STEPS


def _rank(rank: int, case: Case) -> dict[str, Any]:
    # A node of its own: Lightning gives no device to two ranks of one node.
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank))
    steps = _Steps()
    strategy: Any = "auto"
    if case.ranks > 1:
        strategy = DomainStrategy(process_group_backend="gloo", timeout_s=_LIMIT_S)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=case.ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    own = case.domains if case.ranks == 1 else [case.domains[rank]]
    batch = batch_of(own, count=SAMPLES, side=case.side)
    trainer.fit(module_of(case.domains), DataLoader([batch] * (_STEPS + 1), batch_size=None))  # type: ignore[arg-type]
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "step_s": steps.step_s}
