"""What ``result.json`` tells of a training, by its metrics file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from sparsepipe.callbacks.metrics_csv import read_rows
from sparsepipe.tasks.run import Run


def training_values(run: Run) -> dict[str, Any]:
    """Epochs, times and rates of all epochs, and the metrics of the last one."""
    rows = read_rows(run.directory.metrics)
    values: dict[str, Any] = {"epochs": len(rows)}
    if rows:
        values.update({key: _number(value) for key, value in rows[-1].items() if "/" in key})
        times_s = [float(row["time/epoch_s"]) for row in rows if row.get("time/epoch_s")]
        if times_s:
            values["epoch_time_s"] = statistics.median(times_s)
            values["train_time_s"] = sum(times_s)
        rates = [float(r["train/shapes_per_s"]) for r in rows if r.get("train/shapes_per_s")]
        if rates:
            values["train_shapes_per_s"] = statistics.median(rates)
    return values


def profiling_share(values: Mapping[str, Any]) -> dict[str, float]:
    """What the profiles of a plan cost beside the training that they serve."""
    profiling_s, training_s = values.get("profiling_s"), values.get("train_time_s")
    if not profiling_s or not training_s:
        return {}
    return {"profiling_share_of_training": profiling_s / training_s}


def _number(text: str) -> float | None:
    return float(text) if text not in ("", None) else None
