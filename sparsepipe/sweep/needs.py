"""What a job takes of the machine by its configuration, and what it gets to see of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sparsepipe import cluster
from sparsepipe.cluster import Inventory
from sparsepipe.cluster.gpus import any_alike_serve
from sparsepipe.config.job_hardware import hardware_message
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.launch.checked_config import understood
from sparsepipe.planning.placing import places_of_ranks
from sparsepipe.sweep.settings import Settings
from sparsepipe.sweep.slots import Demand, Gpu, Machine, demand
from sparsepipe.utils.host import quota_limits, usable_core_numbers


def machine() -> Machine:
    """The cores and GPUs that this process may use."""
    return Machine(cores=usable_core_numbers(), gpus=_gpus(), binds=not quota_limits())


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tokens = visible.split(",") if visible else [str(index) for index in range(count)]
    return tuple(
        Gpu(token=token, kind=each.name, uuid=str(each.uuid))
        for token, each in zip(tokens, found, strict=False)
    )


def needs(given: Mapping[str, Any], there: Machine, settings: Settings) -> Demand:
    """What a job takes.

    Args:
        given: the values of a resolved and checked configuration.
        there: the machine.
        settings: of the sweep.

    Raises:
        SparsePipeError: what a user can mend, and no process is needed to find out.
    """
    spec, inventory, ranks = understood(RunSpec.from_dict(given))
    task = spec.task.locate()
    count = getattr(task, "processes", None)  # of what is measured as one of several
    return demand(
        there,
        ranks=ranks if count is None else count(spec, inventory),
        gpus=_kinds(spec, inventory, there, ranks=ranks),
        task_cores=getattr(task, "cores", None),
        cores_per_rank=settings.cores_per_rank,
    )


def _kinds(spec: RunSpec, inventory: Inventory, there: Machine, *, ranks: int) -> tuple[str, ...]:
    """Of the GPUs that a job computes on.

    All of them, where it is not known beforehand which they are, or where a plan or a task says
    which and they are not the first of their kinds: a job that saw no others would find too few.
    """
    task = spec.task.locate()
    if inventory.accelerator != "cuda" or hasattr(task, "cores"):
        return ()
    every = tuple(gpu.kind for gpu in there.gpus)
    own_way = any(hasattr(task, name) for name in ("parallel", "processes", "whole_machine"))
    if own_way or spec.search is not None or not _finds_machine(spec):
        return every
    places = places_of_ranks(spec, inventory, ranks=ranks)
    return tuple(place.name for place in places) if any_alike_serve(places) else every


def _finds_machine(spec: RunSpec) -> bool:
    return spec.hardware.locate() is cluster.local


def whole_machine(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to tell a job that gets a part of the machine, such that it is the run it always is.

    None for one whose hardware is written down, which a part of the machine does not change.
    """
    spec = RunSpec.from_dict(given)
    if not _finds_machine(spec):
        return None
    target = spec.inventory_target
    return hardware_message(target, target.build())
