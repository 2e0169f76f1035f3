"""The machine's cores and GPUs, and how many of them a job needs by its configuration."""

from __future__ import annotations

import os
from typing import Any

import yaml

from sparsepipe import cluster
from sparsepipe.cluster.places import any_alike_serve
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.launch.prepare import resolve_run
from sparsepipe.sweep.slots import Demand, Gpu, Machine, Settings, demand
from sparsepipe.tasks.task import Task
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
    """Numbers of ranks and cores, and kinds of GPUs, that a job needs on machine ``there``."""
    run = resolve_run(spec)
    task = run.task
    gpus: tuple[str, ...] = ()
    if task.cores is None and run.inventory.accelerator == "cuda":
        gpus = tuple(gpu.kind for gpu in there.gpus)
        is_given = run.spec.hardware.locate() is not cluster.local
        own_way = task.chooses_devices or type(task).processes is not Task.processes
        may_use_any = is_given or own_way or run.spec.search is not None
        if not may_use_any and any_alike_serve(run.places):
            gpus = tuple(place.name for place in run.places)
    return demand(
        there,
        ranks=task.processes(run),
        gpus=gpus,
        task_cores=task.cores,
        cores_per_rank=settings.cores_per_rank,
    )


def whole_machine(spec: RunSpec) -> dict[str, Any] | None:
    """The message of ``announce_hardware`` for a job that sees only a part of the machine: its run
    id must not depend on that part. None if the configuration gives the inventory itself.
    """
    if spec.hardware.locate() is not cluster.local:
        return None
    target = spec.inventory_target
    inventory = yaml.safe_load(target.build().to_yaml())
    return {"node": target.to_dict(), "inventory": inventory}
