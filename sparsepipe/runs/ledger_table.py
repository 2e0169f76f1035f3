"""Values of many runs as one table: its columns, their types, and cells as text.

A column has one of four types, even if values are missing: booleans, whole numbers, numbers or
text. Lists and mappings are JSON text, and so are all values of a column in which runs have values
of different types, such as ``parallel.devices`` (``auto`` and 2). A ledger has all columns of
:data:`ALWAYS`, then those of :data:`OF_TASKS` that some run has, then all others that runs have
written, ordered by name; the configuration comes last.

In a CSV file, an empty cell is a missing value, a cell that is valid JSON has that value, and any
other cell is text. Text that would be read as something else is quoted as in JSON, so that ``"12"``
is text, but 12 is a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd


Dtype = Literal["boolean", "Int64", "float64", "string"]
"""Type of a column in pandas: booleans, whole numbers, numbers or text."""

_CONFIG = (
    *("backend", "callbacks", "data", "hardware", "hydra", "loss", "model", "optim"),
    *("parallel", "task", "trainer"),
)
"""Groups of the configuration, to which keys such as ``data.root`` belong."""


@dataclass(frozen=True, slots=True)
class LedgerColumn:
    """A column of the ledger: its name, type and unit (empty if it has none)."""

    name: str
    dtype: Dtype
    unit: str = ""


def _columns(dtype: Dtype, unit: str, *names: str) -> tuple[LedgerColumn, ...]:
    return tuple(LedgerColumn(name, dtype, unit) for name in names)


ALWAYS = (
    *_columns("string", "", "name", "run_id", "task_name", "kind", "model", "strategy"),
    *_columns("Int64", "", "ranks", "seed"),
    *_columns("string", "ISO 8601", "started_at", "finished_at"),
    LedgerColumn("wall_s", "float64", "s"),
    *_columns("Int64", "", "starts", "epochs", "steps"),
    *_columns("float64", "0 to 1", "train/accuracy", "val/accuracy"),
    *_columns("float64", "0 to 1", "test/accuracy", "test/class_accuracy"),
    *_columns("float64", "nats", "train/loss", "val/loss", "test/loss"),
    LedgerColumn("best_monitored", "float64"),
    *_columns("float64", "s", "epoch_time_s", "train_time_s", "test_time_s"),
    *_columns("float64", "1/s", "train_shapes_per_s", "test_shapes_per_s"),
    LedgerColumn("inference_shapes_per_s", "float64", "1/s"),
    *_columns("Int64", "bytes", "peak_memory_bytes", "peak_device_memory_bytes"),
    *_columns("Int64", "bytes", "train_peak_memory_bytes", "train_peak_device_memory_bytes"),
    *_columns("Int64", "", "parameters", "train_shapes", "val_shapes", "test_shapes"),
    *_columns("string", "", "hardware_devices", "hardware_accelerator"),
    LedgerColumn("hardware_hosts", "Int64"),
    LedgerColumn("hardware_memory_bytes", "Int64", "bytes"),
    *_columns("Int64", "", "machine_cores", "threads_per_rank"),
    LedgerColumn("matmul_precision", "string"),
    *_columns("string", "", "platform", "python", "sparsepipe", "torch", "cuda"),
    *_columns("string", "", "pytorch-lightning", "hydra-core", "numpy", "git_commit"),
)

OF_TASKS = (
    *_columns("string", "", "scale", "representation", "tags", "objective"),
    *_columns("string", "", "plan_config", "plan_cuts", "plan_devices", "plan_strategy"),
    LedgerColumn("plan_bottleneck_s", "float64", "s"),
    *_columns("float64", "1/s", "plan_shapes_per_s", "plan_samples_per_s"),
    LedgerColumn("profiling_s", "float64", "s"),
    LedgerColumn("profiling_share_of_training", "float64"),
    *_columns("string", "", "evaluated_checkpoint", "differs_from_training", "tested_checkpoint"),
    *_columns("Int64", "", "predicted_files", "unreadable_files"),
    *_columns("string", "", "first_weights", "nonfinite"),
    LedgerColumn("schedule", "string"),
    LedgerColumn("microbatches", "Int64"),
    LedgerColumn("recomputed_layers", "string"),
    *_columns("float64", "1/s", "simulated_shapes_per_s", "samples_per_s", "minibatches_per_s"),
    LedgerColumn("minibatch_s", "float64", "s"),
    *_columns("Int64", "", "minibatches", "steady_steps"),
    LedgerColumn("epoch_s", "float64", "s"),
    *_columns("Int64", "", "epoch_minibatches", "shapes_per_minibatch"),
    *_columns("float64", "1/s", "epoch_minibatches_per_s", "epoch_samples_per_s"),
    *_columns("float64", "", "speedup_over_dp", "epoch_speedup_over_dp"),
    LedgerColumn("speedup_over_dp_without_overlap", "float64"),
    *_columns("float64", "s", "dp_minibatch_s", "dp_epoch_s", "dp_without_overlap_minibatch_s"),
    *_columns("float64", "0 to 1", "busy_share", "bubble_share", "bubble_share_of_busiest"),
    *_columns("float64", "bytes", "device_peak_bytes", "kept_bytes", "kept_bytes_of_device"),
    LedgerColumn("network", "string"),
    LedgerColumn("time_scale", "float64"),
    LedgerColumn("link_bytes_per_s", "float64", "bytes/s"),
    *_columns("float64", "s", "bottleneck_s", "dp_s"),
    LedgerColumn("bottleneck", "string"),
    *_columns("float64", "s", "layers_s", "step_s", "kernel_maps_s", "update_s", "copy_s"),
    LedgerColumn("layers_share_of_step", "float64"),
    LedgerColumn("profile_s", "float64", "s"),
    LedgerColumn("profile_share_of_training", "float64"),
    LedgerColumn("all_reduce_s", "float64", "s"),
    LedgerColumn("all_reduce_over_eq4", "float64"),
    *_columns("Int64", "", "rows", "rows_equal", "rows_co_optimal"),
    LedgerColumn("fits", "boolean"),
    *_columns("Int64", "", "largest_batch", "refused_batch"),
    *_columns("string", "", "largest_size", "refused_size", "measured_sizes"),
    LedgerColumn("limited_by", "string"),
    *_columns("Int64", "bytes", "step_memory_bytes", "budget_bytes"),
    *_columns("string", "", "probed_batches", "probed_outcomes"),
    LedgerColumn("probed_memory_bytes", "string", "bytes"),
    LedgerColumn("probing_s", "float64", "s"),
    LedgerColumn("layers_compute_s", "string", "s"),
    *_columns("string", "bytes", "layers_activation_bytes", "layers_parameter_bytes"),
    LedgerColumn("measured_device", "string"),
    *_columns("float64", "1/s", "flops_per_s", "flops_spread_per_s"),
    *_columns("float64", "bytes/s", "copied_bytes_per_s", "copied_spread_bytes_per_s"),
    LedgerColumn("memory_bytes", "Int64", "bytes"),
)

_KNOWN = {column.name: column for column in (*ALWAYS, *OF_TASKS)}


def ordered(names: Iterable[str]) -> list[str]:
    """The names of the columns, in order, of a ledger whose runs have the keys ``names``."""
    found = set(names)
    known = [c.name for c in ALWAYS] + [c.name for c in OF_TASKS if c.name in found]
    others = sorted(found - set(known))
    config = [name for name in others if "." in name and name.partition(".")[0] in _CONFIG]
    return [*known, *(name for name in others if name not in config), *config]


Row = Mapping[str, Any]
_LARGEST = 2**63 - 1
_TAKES: Mapping[Dtype, frozenset[type]] = {
    "boolean": frozenset({bool}),
    "Int64": frozenset({int}),
    "float64": frozenset({int, float}),
}
"""For each type of column, the types of values that it takes; text takes all."""


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The table of rows, which may have different keys.

    A value that is None, missing or a number that is not finite is missing in the table.
    """
    import pandas as pd

    names = ordered(name for row in rows for name in row)
    columns = {name: _column(name, [_finite(row.get(name)) for row in rows]) for name in names}
    return pd.DataFrame(columns)


def _column(name: str, values: Sequence[Any]) -> pd.Series[Any]:
    """The values as a column of the type known for ``name``, or else of the first that they fit."""
    import pandas as pd

    kinds = {
        str if isinstance(value, int) and abs(value) > _LARGEST else type(value)
        for value in values
        if value is not None
    }
    known: Dtype | None = _KNOWN[name].dtype if name in _KNOWN else None
    if known is None and "/" in name:
        known = "float64"  # most are metrics: test/accuracy/chair
    fitting = (dtype for dtype, taken in _TAKES.items() if kinds and kinds <= taken)
    dtype = known if known and kinds <= _TAKES.get(known, kinds) else next(fitting, "string")
    if dtype == "string":
        texts = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
        # Files cannot hold unpaired surrogates.
        values = [v and v.encode("utf-8", "replace").decode("utf-8") for v in texts]
    elif dtype == "float64":
        values = [None if value is None else float(value) for value in values]
    return pd.Series(values, dtype=dtype)


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values; None for a missing value."""
    import pandas as pd

    columns = {
        str(name): [None if pd.isna(value) else value for value in frame[name].tolist()]
        for name in frame.columns
    }
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def cell_text(value: Any) -> str:
    """A value as the text of a cell, from which :func:`cell_value` reads an equal value."""
    if value is None:
        return ""
    as_it_stands = isinstance(value, str) and value.isprintable() and cell_value(value) == value
    return value if as_it_stands else json.dumps(value)


def cell_value(text: str) -> Any:
    """The value that the text of a CSV cell stands for."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if _finite(value) == value else text  # the bare word Infinity is text


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan_text(config: str, cuts: Sequence[int]) -> str:
    """A plan as text, such as ``2-1 at 24``: replicas of each stage, and the first layer of each
    stage after the first.
    """
    return f"{config} at {', '.join(map(str, cuts))}" if cuts else config
