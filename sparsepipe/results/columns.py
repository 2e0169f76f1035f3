"""The columns of the ledger that have a known meaning: their order, type and unit.

A ledger has the columns of :data:`ALWAYS` whatever ran, then those of :data:`OF_TASKS` that some
run has, then what else runs have written, by name; the configuration comes last. Types belong to
names, so that ledgers of unlike runs agree: what is not listed here has the type of its values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Dtype = Literal["boolean", "Int64", "float64", "string"]
"""Of a column, as pandas calls them: truth, whole numbers, numbers and text."""

_CONFIG = (
    *("backend", "callbacks", "data", "hardware", "model", "optim", "parallel", "task", "trainer"),
)
"""Groups of the configuration, whose keys have a dot behind these."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the ledger.

    Args:
        name: the key in ``result.json``.
        dtype: the type, if all values are of it.
        unit: of its numbers; empty where they have none.
    """

    name: str
    dtype: Dtype
    unit: str = ""


def _columns(dtype: Dtype, unit: str, *names: str) -> tuple[Column, ...]:
    return tuple(Column(name, dtype, unit) for name in names)


ALWAYS = (
    *_columns("string", "", "name", "run_id", "task_name", "kind", "model", "strategy"),
    *_columns("Int64", "", "ranks", "seed"),
    *_columns("string", "ISO 8601", "started_at", "finished_at"),
    Column("wall_s", "float64", "s"),
    *_columns("Int64", "", "starts", "epochs", "steps"),
    *_columns("float64", "0 to 1", "train/accuracy", "val/accuracy"),
    *_columns("float64", "0 to 1", "test/accuracy", "test/class_accuracy"),
    *_columns("float64", "nats", "train/loss", "val/loss", "test/loss"),
    Column("best_monitored", "float64"),
    *_columns("float64", "s", "epoch_time_s", "train_time_s", "test_time_s"),
    *_columns("float64", "1/s", "train_shapes_per_s", "test_shapes_per_s"),
    Column("inference_shapes_per_s", "float64", "1/s"),
    *_columns("Int64", "bytes", "peak_memory_bytes", "peak_device_memory_bytes"),
    *_columns("Int64", "bytes", "train_peak_memory_bytes", "train_peak_device_memory_bytes"),
    *_columns("Int64", "", "parameters", "train_shapes", "val_shapes", "test_shapes"),
    *_columns("string", "", "hardware_devices", "hardware_accelerator"),
    Column("hardware_hosts", "Int64"),
    Column("hardware_memory_bytes", "Int64", "bytes"),
    *_columns("Int64", "", "machine_cores", "threads_per_rank"),
    *_columns("string", "", "platform", "python", "sparsepipe", "torch", "cuda"),
    *_columns("string", "", "pytorch-lightning", "hydra-core", "numpy", "git_commit"),
)

OF_TASKS = (
    *_columns("string", "", "scale", "representation", "tags", "objective"),
    *_columns("string", "", "plan_config", "plan_cuts", "plan_devices", "plan_strategy"),
    Column("plan_bottleneck_s", "float64", "s"),
    *_columns("float64", "1/s", "plan_shapes_per_s", "plan_samples_per_s"),
    Column("profiling_s", "float64", "s"),
    Column("profiling_share_of_training", "float64"),
    *_columns("string", "", "evaluated_checkpoint", "first_weights"),
    Column("schedule", "string"),
    Column("microbatches", "Int64"),
    Column("recomputed_layers", "string"),
    *_columns("float64", "1/s", "simulated_shapes_per_s", "samples_per_s", "minibatches_per_s"),
    Column("minibatch_s", "float64", "s"),
    *_columns("Int64", "", "minibatches", "steady_steps"),
    Column("epoch_s", "float64", "s"),
    *_columns("Int64", "", "epoch_minibatches", "shapes_per_minibatch"),
    *_columns("float64", "1/s", "epoch_minibatches_per_s", "epoch_samples_per_s"),
    *_columns("float64", "", "speedup_over_dp", "epoch_speedup_over_dp"),
    Column("speedup_over_dp_without_overlap", "float64"),
    *_columns("float64", "s", "dp_minibatch_s", "dp_epoch_s", "dp_without_overlap_minibatch_s"),
    *_columns("float64", "0 to 1", "busy_share", "bubble_share"),
    Column("device_peak_bytes", "float64", "bytes"),
    Column("network", "string"),
    Column("time_scale", "float64"),
    Column("link_bytes_per_s", "float64", "bytes/s"),
    *_columns("float64", "s", "bottleneck_s", "dp_s"),
    Column("bottleneck", "string"),
    *_columns("float64", "s", "layers_s", "step_s", "kernel_maps_s", "update_s", "copy_s"),
    Column("layers_share_of_step", "float64"),
    Column("profile_s", "float64", "s"),
    Column("profile_share_of_training", "float64"),
    Column("all_reduce_s", "float64", "s"),
    Column("all_reduce_over_eq4", "float64"),
    *_columns("Int64", "", "rows", "rows_equal", "rows_co_optimal"),
    Column("fits", "boolean"),
    *_columns("Int64", "", "largest_batch", "refused_batch"),
    Column("limited_by", "string"),
    *_columns("Int64", "bytes", "step_memory_bytes", "budget_bytes"),
    *_columns("string", "", "probed_batches", "probed_outcomes"),
    Column("probed_memory_bytes", "string", "bytes"),
    Column("probing_s", "float64", "s"),
    Column("layers_compute_s", "string", "s"),
    *_columns("string", "bytes", "layers_activation_bytes", "layers_parameter_bytes"),
    Column("measured_device", "string"),
    *_columns("float64", "1/s", "flops_per_s", "flops_spread_per_s"),
    *_columns("float64", "bytes/s", "copied_bytes_per_s", "copied_spread_bytes_per_s"),
    Column("memory_bytes", "Int64", "bytes"),
)

_KNOWN = {column.name: column for column in (*ALWAYS, *OF_TASKS)}


def ordered(names: Iterable[str]) -> list[str]:
    """The columns of a ledger whose runs have these keys, in their order."""
    found = set(names)
    known = [c.name for c in ALWAYS] + [c.name for c in OF_TASKS if c.name in found]
    others = sorted(found - set(known), key=lambda name: (_is_config(name), name))
    return known + others


def known_dtype(name: str) -> Dtype | None:
    """The type of a column whose values are all of it; None where they tell it."""
    if name in _KNOWN:
        return _KNOWN[name].dtype
    return "float64" if "/" in name else None  # most are metrics: test/accuracy/chair


def _is_config(name: str) -> bool:
    return "." in name and name.partition(".")[0] in _CONFIG
