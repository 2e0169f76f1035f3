"""``result.json``: the results of a run as a flat mapping, so that many runs make a table.

Entries of all tasks are put together here; docs/results.md lists what each key means.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

import pytorch_lightning as pl
import torch

from sparsepipe import __version__
from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.partition.activation_checkpointing.setting import bounds_of
from sparsepipe.runs.run_tree import moment
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan
from sparsepipe.strategies import StagedStrategy
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import write_json
from sparsepipe.utils.host import git_commit, usable_cores

_PACKAGES = ("torch", "pytorch-lightning", "hydra-core", "numpy")
_LEFT_OUT = (
    *("checkpoint", "checkpoint_strict", "force", "input", "logger", "paths"),
    *("data.root", "data.cache_dir"),
)


def write_result(run: ResolvedRun, values: Mapping[str, Any]) -> None:
    """Writes a task's ``values`` with configuration, times, memory, hardware and versions.

    The task's values take the place of general ones. Every rank must call it; rank 0 writes.
    """
    peaks = peak_values()
    if process_group.rank() != 0:
        return
    settings = {k: v for k, v in run.spec.flat().items() if not _is_left_out(k, v)}
    write_json(
        run.directory.result,
        {
            "run_id": run.directory.run_id,
            "task_name": run.task.name,
            "kind": "measured",
            "model": run.spec.model.name,
            "strategy": strategy_name(run.spec),
            **_times(run.directory),
            **peaks,
            **values,
            "ranks": run.ranks,
            **_hardware(run.inventory),
            **versions(),
            **settings,
        },
    )


def _is_left_out(key: str, value: object) -> bool:
    """Whether ``result.json`` leaves a setting out: paths, an empty ``callbacks`` and ``study``."""
    named = any(key == each or key.startswith(f"{each}.") for each in _LEFT_OUT)
    return named or (key in ("callbacks", "study") and not value)


def strategy_name(spec: RunSpec) -> str:
    """How devices share the work.

    That is ``single``, ``dp``, ``spatial``, ``domain``, the search of a plan, or ``pipeline``.

    Of a synchronous pipeline it is the option of ``parallel`` with its schedule, and the search
    after that, if there is one: ``gpipe``, ``gpipe hete_mp``. Of a simulation it is what that
    simulates.
    """
    if simulated := spec.task.get("parallel"):
        spec = spec.replace(parallel=simulated)
    parallel = spec.parallel
    if parallel.strategy is None:
        return "single"
    if parallel.roles is not None:
        return "domain"
    if parallel.plan is None:
        return "dp" if parallel.grid is None else "spatial"
    search, synchronous = spec.search, parallel.synchronous
    names = [synchronous and synchronous.option, search and search.search]
    return " ".join(name for name in names if name) or "pipeline"


def _times(directory: RunDir) -> dict[str, Any]:
    """Begin, end and duration of the run, pauses included."""
    now_s, starts = time.time(), directory.starts
    began_s = starts[0] if starts else None
    return {
        "started_at": None if began_s is None else moment(began_s),
        "finished_at": moment(now_s),
        "wall_s": None if began_s is None else now_s - began_s,
        "starts": len(starts),
    }


def _hardware(inventory: Inventory) -> dict[str, Any]:
    devices = [device for host in inventory.hosts for device in host.devices]
    memories = [d.count * d.memory_bytes for d in devices if d.memory_bytes is not None]
    return {
        "hardware_devices": ", ".join(f"{d.count} x {d.name}" for d in devices),
        "hardware_accelerator": inventory.accelerator,
        "hardware_hosts": len(inventory.hosts),
        "hardware_memory_bytes": int(sum(memories)) if len(memories) == len(devices) else None,
        "machine_cores": usable_cores(),
        "threads_per_rank": torch.get_num_threads(),
    }


def versions() -> dict[str, Any]:
    """Of the platform, of Python and of the packages that results depend on."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "sparsepipe": __version__,
        "cuda": torch.version.cuda,
        **{name: metadata.version(name) for name in _PACKAGES},
        "git_commit": git_commit(),
    }


def peak_values() -> dict[str, int]:
    """The largest memory of a process so far, over the ranks; collective."""
    peaks = process_group.gather_objects(peak_memory_bytes())
    return {f"peak_{name}": max(peak[name] for peak in peaks) for name in peaks[0]}


def plan_values(run: ResolvedRun, trainer: pl.Trainer) -> dict[str, Any]:
    """Stages of a pipeline and the expected times of its search; empty for other strategies."""
    strategy = trainer.strategy
    if not isinstance(strategy, StagedStrategy):
        return {}
    values = {"plan_config": strategy.plan.config, "plan_cuts": list(strategy.plan.cuts)}
    if (synchronous := run.spec.parallel.synchronous) is not None:
        values.update(asdict(synchronous))
    if any(strategy.recomputed):
        values["recomputed_layers"] = bounds_of(strategy.recomputed)
    return {**values, **_expected(run), **run.busy.values()}


def _expected(run: ResolvedRun) -> dict[str, Any]:
    """Times by the cost model of the plan's search: simulated, not measured."""
    details = Plan.load(run.directory.plan).details if run.directory.plan.exists() else {}
    bottleneck_s, size = details.get("bottleneck_s"), run.spec.data.get("batch_size")
    values: dict[str, Any] = {
        "plan_strategy": details.get("strategy"),
        "plan_bottleneck_s": bottleneck_s,
        "plan_shapes_per_s": size / bottleneck_s if size and bottleneck_s else None,
        "profiling_s": details.get("profiling_s") or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def peak_memory_bytes() -> dict[str, int]:
    """Peak memory of this process, and of its GPU if it uses one."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available():
        peaks["device_memory_bytes"] = torch.cuda.max_memory_allocated()
    return peaks
