"""Finished runs of the paper's experiments, by hand: keys as result.json has them."""

from __future__ import annotations

from itertools import count
from typing import Any

from sparsepipe.report.chapter import Block, Cell

_NUMBERS = count()

HERE = {
    "kind": "measured",
    "hardware_devices": "2 x Xeon",
    "hardware_accelerator": "cpu",
    "machine_cores": 2,
    "python": "3.11.7",
    "torch": "2.13.0",
    "sparsepipe": "0.1.0",
    "git_commit": "abc123",
}


def run(task: str, name: str, **values: Any) -> dict[str, Any]:
    return {
        "run_id": f"{task}{next(_NUMBERS)}",
        "task_name": task,
        "name": name,
        "study.exhibit": name,
        "seed": 0,
        "ranks": 1,
        **HERE,
        **values,
    }


def shapes(network: str, resolution: int, p: float = 1.0) -> dict[str, Any]:
    """Settings of trainings at scale desk."""
    return {
        "scale": "desk",
        "representation": network,
        "data.source._target_": "sparsepipe.data.sources.GeneratedShapes",
        "data.source.train_per_class": 200,
        "data.num_points": 4096,
        "data.resolution": resolution,
        "data.point_ratio": p,
        "data.batch_size": 16,
        "model.width": 0.25,
        "trainer.max_epochs": 4,
        "study.cell.devices": 1,
        "study.cell.network": network,
        "study.cell.resolution": resolution,
        "study.cell.point_ratio": p,
    }


def training(
    network: str, resolution: int, p: float = 1.0, *,
    ranks: int = 1, epoch_s: float = 10.0, test: float = 0.85, train: float = 0.99,
    name: str = "table2", task: str = "train", **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A training on 4,000 shapes, by as many threads as there are cores."""
    cores = more.get("machine_cores", HERE["machine_cores"]) or 1
    return run(
        task,
        name,
        **{
            **shapes(network, resolution, p),
            "ranks": ranks,
            "threads_per_rank": max(1, cores // ranks),
            "train/accuracy": train,
            "test/accuracy": test,
            "epoch_time_s": epoch_s,
            "train_shapes_per_s": 4000 / epoch_s,
            "study.cell.devices": ranks,
            **more,
        },
    )


def fitting(network: str, resolution: int, p: float = 1.0, *, batch: int, **more: Any):
    """A search for the very largest batch, which memory ended."""
    return run(
        "fit_batch",
        "table2",
        **{
            **shapes(network, resolution, p),
            "largest_batch": batch,
            "refused_batch": batch + 1,
            "limited_by": "over_budget",
            "budget_bytes": 2_750_000_000,
            **more,
        },
    )


def cell(block: Block, column: str, *row: str) -> Cell:
    (found,) = [c for c in block.cells if c.row == row and c.column.key == column]
    return found


def value(block: Block, column: str, *row: str) -> Any:
    ours = cell(block, column, *row).ours
    return None if ours is None else ours.value
