"""What a job takes of the machine by its configuration, and what it gets to see of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sparsepipe import cluster
from sparsepipe.cluster import Inventory
from sparsepipe.cluster.gpus import any_alike_serve
from sparsepipe.config.build import build
from sparsepipe.config.emulation import without_emulation
from sparsepipe.config.job_hardware import telling
from sparsepipe.config.plan_search import search_of
from sparsepipe.config.signature import locate
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


def needs(config: Mapping[str, Any], there: Machine, settings: Settings) -> Demand:
    """What a job takes.

    Args:
        config: resolved and checked.
        there: the machine.
        settings: of the sweep.

    Raises:
        SparsePipeError: what a user can mend, and no process is needed to find out.
    """
    config, inventory, ranks = understood(config)
    task = locate(config["task"]["_target_"])
    count = getattr(task, "processes", None)  # of what is measured as one of several
    return demand(
        there,
        ranks=ranks if count is None else count(config, inventory),
        gpus=_kinds(config, inventory, there, ranks=ranks),
        task_cores=getattr(task, "cores", None),
        cores_per_rank=settings.cores_per_rank,
    )


def _kinds(
    config: Mapping[str, Any], inventory: Inventory, there: Machine, *, ranks: int
) -> tuple[str, ...]:
    """Of the GPUs that a job computes on.

    All of them, where it is not known beforehand which they are, or where a plan or a task says
    which and they are not the first of their kinds: a job that saw no others would find too few.
    """
    task = locate(config["task"]["_target_"])
    if inventory.accelerator != "cuda" or hasattr(task, "cores"):
        return ()
    every = tuple(gpu.kind for gpu in there.gpus)
    own_way = any(hasattr(task, name) for name in ("parallel", "processes", "whole_machine"))
    if own_way or search_of(config) is not None or not _finds_machine(config):
        return every
    places = places_of_ranks(config, inventory, ranks=ranks)
    return tuple(place.name for place in places) if any_alike_serve(places) else every


def _finds_machine(config: Mapping[str, Any]) -> bool:
    return locate(config["hardware"]["_target_"]) is cluster.local


def whole_machine(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to tell a job that gets a part of the machine, such that it is the run it always is.

    None for one whose hardware is written down, which a part of the machine does not change.
    """
    if not _finds_machine(config):
        return None
    node = without_emulation(config["hardware"])
    return telling(node, build(node))
