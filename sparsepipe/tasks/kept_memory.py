"""Memory that a training keeps on its devices: parameters, optimizer state, stored activations.

A profile counts for each layer the bytes of the tensors that torch saves for its backward
(``saved_tensors_hooks``), and a schedule determines how many microbatches a stage keeps at once.
Of spans of layers that are recomputed only the inputs stay, and one microbatch at a time has in
addition what is inside of one of them. With the parameters and the optimizer's state that is what
stays on a device; gradients, buffers of messages and what a layer needs for a moment come on top.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsepipe.cluster.places import device_name
from sparsepipe.config.schema import SearchChoice, Synchronous
from sparsepipe.errors import SparsePipeError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans, spans_in_plan
from sparsepipe.partition.activation_checkpointing.stage_memory import most_kept
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.planning.search import memory_model
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import Stage
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.memory import long_run_peaks_bytes
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.simulate.workload import StageCosts, Workload
from sparsepipe.tasks.task import ResolvedRun

log = logging.getLogger(__name__)


def kept_values(run: ResolvedRun) -> dict[str, float]:
    """Bytes of parameters, optimizer state and stored activations, for ``result.json``.

    Nothing without profiles of the devices on batches as they are trained on, or with data
    parallelism. Where there are profiles that cannot be counted by, the log says why: a training is
    not to fail of it.
    """
    parallel = run.spec.parallel
    if parallel.strategy is not None and parallel.plan is None:
        return {}
    try:
        profiles = _profiles(run)
        if any(place.name not in profiles for place in run.places):
            return {}  # as in most trainings, whose devices have no profile
        plan = _plan(run, profiles)
        if plan.has_grids:
            return {}  # profiles are of whole samples
        model = replace(memory_model(SearchChoice(), run.spec) or MemoryModel(), gradients=0.0)
        if any(layer.saved_bytes is None for p in profiles.values() for layer in p.layers):
            return {}
        ranks = kept_bytes(plan, profiles, model, parallel.synchronous)
    except SparsePipeError as error:  # such as a file that is broken, or of other layers
        log.info("kept_bytes is left out: %s", error.message)
        return {}
    return {"kept_bytes": sum(ranks), "kept_bytes_of_device": max(ranks)}


def kept_bytes(
    plan: Plan,
    profiles: Mapping[str, Profile],
    model: MemoryModel,
    synchronous: Synchronous | None,
) -> list[float]:
    """The most that each rank keeps.

    Args:
        plan: whose devices are named; a synchronous pipeline recomputes what its details say.
        profiles: of these, by name.
        model: what counts beside activations.
        synchronous: the schedule; None: the asynchronous one, in which one device alone is serial.

    Raises:
        PlanError: the profiles have other layers.
        ConfigError: the plan recomputes layers that it does not have.
    """
    schedule: dict[str, Any] = {}
    spans: StageSpans = ((),) * plan.num_stages
    if synchronous is not None:
        schedule = {
            "schedule": synchronous.schedule,
            "microbatches": synchronous.microbatches,
        }
        spans = spans_in_plan(plan)
    workload = Workload.of(plan, profiles)
    stages = tuple(
        _counted(costs, stage, own, profiles)
        for costs, stage, own in zip(workload.stages, plan.stages, spans, strict=True)
    )
    simulation = Simulation.of(
        replace(workload, stages=stages),
        Setting(network=ClusterNetwork.flat(plan.num_ranks)),
        **schedule,
    )
    return long_run_peaks_bytes(simulation, model)


def _counted(
    costs: StageCosts, stage: Stage, spans: Sequence[range], profiles: Mapping[str, Profile]
) -> StageCosts:
    """Costs with what one minibatch keeps in a stage on its devices."""
    held = [profiles[name] for name in dict.fromkeys(map(device_name, stage.devices))]
    stored, inside = most_kept(held, spans, first=stage.layers[0], last=stage.layers[1])
    return replace(costs, stored_bytes=stored, recomputed_bytes=inside)


def _profiles(run: ResolvedRun) -> dict[str, Profile]:
    """Profiles of the run's devices: given, or measured before it."""
    spec = run.spec
    kept = Plan.load(run.directory.plan).details if run.directory.plan.exists() else {}
    given = {**spec.given_profiles, **(kept.get("measured") or {})}
    settings = spec.model.settings
    found = load_profiles(run.inventory, spec.model.name, given=given, settings=settings)
    if spec.emulation is None:  # else the profiles are what is trained
        size = spec.data.get("batch_size")
        return {n: p for n, p in found.items() if p.meta.get("batch_size") == size}
    return found


def _plan(run: ResolvedRun, profiles: Mapping[str, Profile]) -> Plan:
    if run.spec.parallel.strategy is not None:
        return Plan.load(run.directory.plan)
    device = run.places[0]
    layers = profiles[device.name].num_layers
    plan = Plan.of(config="1", cuts=(), num_layers=layers)
    return replace(plan, stages=(replace(plan.stages[0], devices=(device.text,)),))
