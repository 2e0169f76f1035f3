"""The machine's cores and GPUs, and how much of them a job needs by its configuration."""

from __future__ import annotations

import os
from typing import Any

from sparsepipe import cluster
from sparsepipe.cluster import Inventory
from sparsepipe.cluster.places import any_alike_serve
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_environment import hardware_message
from sparsepipe.launch.prepare import resolve_run
from sparsepipe.planning.devices import places_of_ranks
from sparsepipe.sweep.slots import Demand, Gpu, Machine, Settings, demand
from sparsepipe.tasks.task import Task, task_class, task_of
from sparsepipe.utils.host import quota_limits, usable_core_numbers


def machine() -> Machine:
    """The cores that this process may run on, and the GPUs that PyTorch sees."""
    import torch

    gpus: tuple[Gpu, ...] = ()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found = [torch.cuda.get_device_properties(index) for index in range(count)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        tokens = visible.split(",") if visible else [str(index) for index in range(count)]
        gpus = tuple(
            Gpu(token=token, kind=each.name, uuid=str(each.uuid))
            for token, each in zip(tokens, found, strict=False)
        )
    return Machine(cores=usable_core_numbers(), gpus=gpus, binds=not quota_limits())


def needs(spec: RunSpec, there: Machine, settings: Settings) -> Demand:
    """The cores and GPUs that a job needs.

    Raises:
        SparsePipeError: the configuration cannot be run.
    """
    spec, inventory, ranks = resolve_run(spec)
    task = task_of(spec)
    return demand(
        there,
        ranks=task.processes(spec, inventory),
        gpus=_kinds(spec, inventory, there, ranks=ranks),
        task_cores=task.cores,
        cores_per_rank=settings.cores_per_rank,
    )


def _kinds(spec: RunSpec, inventory: Inventory, there: Machine, *, ranks: int) -> tuple[str, ...]:
    """Kinds of the GPUs that a job computes on."""
    task = task_class(spec)
    if inventory.accelerator != "cuda" or task.cores is not None:
        return ()
    every = tuple(gpu.kind for gpu in there.gpus)
    own_way = task.chooses_devices or task.whole_machine or task.processes is not Task.processes
    if own_way or spec.search is not None or not _finds_machine(spec):
        return every
    places = places_of_ranks(spec, inventory, ranks=ranks)
    return tuple(place.name for place in places) if any_alike_serve(places) else every


def _finds_machine(spec: RunSpec) -> bool:
    return spec.hardware.locate() is cluster.local


def whole_machine(spec: RunSpec) -> dict[str, Any] | None:
    """The whole machine, for a job that sees a part of it: its run id must not depend on that.

    None for a job whose inventory is written down.
    """
    if not _finds_machine(spec):
        return None
    target = spec.inventory_target
    return hardware_message(target, target.build())
