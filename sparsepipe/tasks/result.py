"""Writes ``result.json``, the results of a run as a flat mapping, so that many runs form a table.

docs/results.md says what each key means.
"""

from __future__ import annotations

import logging
import platform
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import pytorch_lightning as pl
import torch

from sparsepipe import __version__
from sparsepipe.cluster.places import device_name
from sparsepipe.config.run_spec import RunSpec, is_below
from sparsepipe.config.schema import SearchChoice, Synchronous
from sparsepipe.errors import SparsePipeError
from sparsepipe.partition.activation_checkpointing.setting import (
    StageSpans,
    bounds_of,
    spans_in_plan,
)
from sparsepipe.partition.activation_checkpointing.stage_memory import most_kept
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.planning.search import memory_model
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import moment
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.memory import long_run_peaks_bytes
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.simulate.workload import Workload
from sparsepipe.strategies import StagedStrategy
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import write_json
from sparsepipe.utils.host import git_commit, usable_cores
from sparsepipe.utils.process import matmul_precision_on

log = logging.getLogger(__name__)

_PACKAGES = ("torch", "pytorch-lightning", "hydra-core", "numpy")
_LEFT_OUT = (
    *("checkpoint", "checkpoint_strict", "force", "input", "logger", "paths"),
    *("data.root", "data.cache_dir"),
)
"""Settings that results leave out; ``callbacks`` and ``study`` are left out only if empty."""


def write_result(run: ResolvedRun, values: Mapping[str, Any]) -> None:
    """Writes a task's ``values`` with configuration, times, memory, hardware and versions.

    A task's values take precedence over the general kind, model, strategy, times and memory. Every
    rank must call it; rank 0 writes.
    """
    peaks = peak_values()
    if process_group.rank() != 0:
        return
    now_s, starts, inventory = time.time(), run.directory.starts, run.inventory
    began_s = starts[0] if starts else None
    devices = [device for host in inventory.hosts for device in host.devices]
    memories = [d.count * d.memory_bytes for d in devices if d.memory_bytes is not None]
    settings = {
        key: value
        for key, value in run.spec.flat().items()
        if not is_below(key, _LEFT_OUT) and (value or key not in ("callbacks", "study"))
    }
    write_json(
        run.directory.result,
        {
            "run_id": run.directory.run_id,
            "task_name": run.task.name,
            "kind": "measured",
            "model": run.spec.model.name,
            "strategy": strategy_name(run.spec),
            "started_at": None if began_s is None else moment(began_s),
            "finished_at": moment(now_s),
            "wall_s": None if began_s is None else now_s - began_s,  # pauses included
            "starts": len(starts),
            **peaks,
            **values,
            "ranks": run.ranks,
            "hardware_devices": ", ".join(f"{d.count} x {d.name}" for d in devices),
            "hardware_accelerator": ", ".join(inventory.accelerators),
            "hardware_hosts": len(inventory.hosts),
            "hardware_memory_bytes": int(sum(memories)) if len(memories) == len(devices) else None,
            "machine_cores": usable_cores(),
            "threads_per_rank": torch.get_num_threads(),
            # That of the devices that a task plans for, where it only plans.
            "matmul_precision": matmul_precision_on(
                inventory.accelerator, run.spec.trainer.matmul_precision
            ),
            **versions(),
            **settings,
        },
    )


def strategy_name(spec: RunSpec) -> str:
    """Returns how devices share the work: ``single``, ``dp``, ``spatial``, ``domain``,
    ``pipeline``, or the name of the search that chose the plan of a pipeline.

    For a synchronous pipeline, the name of its option of ``parallel`` comes first: ``gpipe``,
    ``gpipe hete_mp``. For a simulation, the name is that of the simulated strategy.
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


def versions() -> dict[str, Any]:
    """Returns the versions of platform, Python and packages, and SparsePipe's git commit."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "sparsepipe": __version__,
        "cuda": torch.version.cuda,
        **{name: metadata.version(name) for name in _PACKAGES},
        "git_commit": git_commit(),
    }


def peak_values() -> dict[str, int]:
    """Returns the peak bytes so far of any rank's process and GPU; every rank must call it."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available():
        own["device_memory_bytes"] = torch.cuda.max_memory_allocated()
    peaks = process_group.gather_objects(own)
    return {f"peak_{name}": max(peak[name] for peak in peaks) for name in peaks[0]}


def plan_values(run: ResolvedRun, trainer: pl.Trainer) -> dict[str, Any]:
    """Returns, for a pipeline, its stages, the times that its search expected, and the idle shares
    of ranks, which were measured; empty for other strategies.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, StagedStrategy):
        return {}
    values = {"plan_config": strategy.plan.config, "plan_cuts": list(strategy.plan.cuts)}
    if (synchronous := run.spec.parallel.synchronous) is not None:
        values.update(asdict(synchronous))
    if any(strategy.recomputed):
        values["recomputed_layers"] = bounds_of(strategy.recomputed)
    details = Plan.load(run.directory.plan).details if run.directory.plan.exists() else {}
    bottleneck_s, size = details.get("bottleneck_s"), run.spec.data.get("batch_size")
    expected: dict[str, Any] = {
        "plan_strategy": details.get("strategy"),
        "plan_bottleneck_s": bottleneck_s,
        "plan_shapes_per_s": size / bottleneck_s if size and bottleneck_s else None,
        "profiling_s": details.get("profiling_s") or None,
    }
    known = {name: value for name, value in expected.items() if value is not None}
    return {**values, **known, **run.busy.values()}


def kept_values(run: ResolvedRun) -> dict[str, float]:
    """Returns the sum and the maximum of :func:`kept_bytes` over ranks, for ``result.json``.

    Empty with data parallelism, or without profiles of the devices at the training's batch size. If
    the profiles cannot be used, the log says why, since a training should not fail because of it.
    """
    spec, parallel = run.spec, run.spec.parallel
    if parallel.strategy is not None and parallel.plan is None:
        return {}
    try:
        kept = Plan.load(run.directory.plan) if run.directory.plan.exists() else None
        measured = None if kept is None else kept.details.get("measured")
        given = {**spec.given_profiles, **(measured or {})}
        settings, size = spec.model.settings, spec.data.get("batch_size")
        profiles = load_profiles(run.inventory, spec.model.name, given=given, settings=settings)
        if spec.emulation is None:  # an emulation trains the profiles themselves
            profiles = {n: p for n, p in profiles.items() if p.meta.get("batch_size") == size}
        if any(place.name not in profiles for place in run.places):
            return {}  # as in most trainings, whose devices have no profile
        if parallel.strategy is None:
            device = run.places[0]
            layers = profiles[device.name].num_layers
            plan = Plan.of(config="1", cuts=(), num_layers=layers)
            plan = replace(plan, stages=(replace(plan.stages[0], devices=(device.text,)),))
        else:
            plan = Plan.load(run.directory.plan)
        counted = all(
            layer.saved_bytes is not None for p in profiles.values() for layer in p.layers
        )
        if plan.has_grids or not counted:  # profiles are of whole samples
            return {}
        model = replace(memory_model(SearchChoice(), spec) or MemoryModel(), gradients=0.0)
        ranks = kept_bytes(plan, profiles, model, parallel.synchronous)
    except SparsePipeError as error:  # such as a file that is broken or for other layers
        log.info("kept_bytes is left out: %s", error.message)
        return {}
    return {"kept_bytes": sum(ranks), "kept_bytes_of_device": max(ranks)}


def kept_bytes(
    plan: Plan, profiles: Mapping[str, Profile], model: MemoryModel, synchronous: Synchronous | None
) -> list[float]:
    """Returns the peak bytes that each rank stores: parameters, optimizer state, activations.

    For each layer, a profile has the bytes of the tensors that torch saves for its backward
    (``saved_tensors_hooks``), and a schedule determines how many microbatches a stage keeps at
    once. A recomputed span keeps only its input, except that one microbatch at a time also has the
    bytes inside one span. Gradients, message buffers and temporary tensors are not counted.

    Args:
        plan: a plan with named devices; its details list what a synchronous pipeline recomputes.
        profiles: profiles of these devices by name.
        model: says which bytes count in addition to activations.
        synchronous: the schedule; None: the asynchronous one, or that of a single device.
    """
    schedule: dict[str, Any] = {}
    spans: StageSpans = ((),) * plan.num_stages
    if synchronous is not None:
        schedule = {"schedule": synchronous.schedule, "microbatches": synchronous.microbatches}
        spans = spans_in_plan(plan)
    workload = Workload.of(plan, profiles)
    stages = []
    for costs, stage, own in zip(workload.stages, plan.stages, spans, strict=True):
        held = [profiles[name] for name in dict.fromkeys(map(device_name, stage.devices))]
        stored, inside = most_kept(held, own, first=stage.layers[0], last=stage.layers[1])
        stages.append(replace(costs, stored_bytes=stored, recomputed_bytes=inside))
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
    simulation = Simulation.of(replace(workload, stages=tuple(stages)), setting, **schedule)
    return long_run_peaks_bytes(simulation, model)
