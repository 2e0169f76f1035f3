"""The same training by torch.distributed.pipelining: GPipe and 1F1B, as its users write it.

A plain loop over minibatches: the schedule's step, the optimizer's step. No Lightning, no logs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from pipeline_bound import TIMEOUT_S
from pipeline_training import Epoch, Trained, Way
from pipeline_workloads import CLASSES, Workload, sgd
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from sparsepipe.runtime.collectives import process_group

SCHEDULES: Mapping[Literal["gpipe", "1f1b"], Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def train_by_torch(
    rank: int, workload: Workload, way: Way, minibatches: int, epochs: int
) -> Trained:
    """Trains this rank's stage.

    Args:
        rank: this one, a stage.
        workload: network and data, dense.
        way: a synchronous pipeline of one rank a stage.
        minibatches: of an epoch.
        epochs: how many; the first one warms up.
    """
    plan = way.plan
    assert plan is not None
    assert way.schedule is not None
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    first, last = plan.stages[rank].layers
    layers = nn.Sequential(*list(workload.layers())[first : last + 1])
    optimizer = sgd(layers.parameters())
    stage = PipelineStage(layers, rank, plan.num_stages, torch.device("cpu"))
    make = SCHEDULES[way.schedule]
    run = make(stage, n_microbatches=way.microbatches, loss_fn=F.cross_entropy)
    label_B = torch.arange(workload.batch_size) % CLASSES
    found: list[Epoch] = []
    for _ in range(epochs):
        inputs = [workload.input(number) for number in range(minibatches)] if rank == 0 else []
        dist.barrier()
        begun_s, ends_s = time.perf_counter(), []
        for number in range(minibatches):
            if rank == 0:
                run.step(inputs[number])
            elif rank == plan.num_stages - 1:
                run.step(target=label_B, losses=[])
            else:
                run.step()
            optimizer.step()
            optimizer.zero_grad()
            ends_s.append(time.perf_counter())
        found.append(Epoch.of(begun_s, ends_s))
    dist.barrier()
    process_group.leave()
    return Trained(epochs=tuple(found))
