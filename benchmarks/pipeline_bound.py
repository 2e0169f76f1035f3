"""What no pipeline can beat: the slowest stage's own time, and the least bytes between stages.

Stages compute at the same time on all cores, as in a pipeline, and nothing is sent: inputs
and gradients lie ready. Plain autograd and ``optimizer.step``; no Lightning, no weight
versions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pipeline_workloads import CLASSES, DIFFERENT, Workload, fresh
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.transport.serialization import differentiable
from sparsepipe.schedule import Plan
from sparsepipe.sparse import SparseTensor

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBytes:
    """Of one minibatch across one cut, mean over the minibatches that differ.

    Attributes:
        features: of the activation; as much comes back as gradient.
        coordinates: that go down once.
    """

    features: float
    coordinates: float

    @property
    def sum(self) -> float:
        """Both ways."""
        return 2 * self.features + self.coordinates


def layer_seconds(rank: int, workload: Workload, passes: int) -> list[float]:
    """Forward, backward and update of each layer, while as much runs on the other rank.

    In processor time, so that whatever else the machine does moves no cut.
    """
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    layers = workload.layers()
    optimizers = [_optimizer(layer) for layer in layers]
    sums = [0.0] * len(layers)
    for number in range(passes + 1):
        seconds = _one_pass(layers, optimizers, fresh(workload.input(number)))
        if number:  # the first one warms up
            sums = [a + b for a, b in zip(sums, seconds, strict=True)]
    dist.barrier()
    process_group.leave()
    return [total / passes for total in sums]


def _one_pass(layers: nn.Sequential, optimizers: Sequence[Any], value: Any) -> list[float]:
    seconds = []
    ends: list[tuple[Any, Any]] = []
    for layer in layers:
        start_s = time.thread_time()
        output = layer(value)
        seconds.append(time.thread_time() - start_s)
        ends.append((value, output))
        value = _apart(output)
    gradient: Tensor | None = torch.randn_like(_features(output))
    del output
    for number in reversed(range(len(layers))):
        start_s = time.thread_time()
        value, output = ends.pop()  # freed layer by layer, as by a backward pass in one piece
        torch.autograd.backward(_features(output), gradient)
        if optimizers[number] is not None:
            optimizers[number].step()
            optimizers[number].zero_grad()
        seconds[number] += time.thread_time() - start_s
        gradient = _features(value).grad
    return seconds


def stage_seconds(rank: int, workload: Workload, plan: Plan, least_s: float) -> float:
    """Forward, backward and update of this rank's stage, mean over minibatches.

    Args:
        rank: its stage, one rank each.
        workload: network and data.
        plan: cuts the network.
        least_s: how long to measure; whole rounds of the minibatches that differ.
    """
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    first, last = plan.stages[rank].layers
    layers = workload.layers()
    inputs = [_before(layers, first, workload.input(number)) for number in range(DIFFERENT)]
    labels_B = torch.arange(workload.batch_size) % CLASSES
    stage = nn.Sequential(*list(layers)[first : last + 1])
    optimizer = _optimizer(stage)
    gradients: list[Any] = [None] * DIFFERENT

    def step(number: int) -> None:
        value = _again(inputs[number], wants_gradient=first > 0)
        for layer in stage:
            value = layer(value)
        if last + 1 == len(layers):
            torch.autograd.backward(F.cross_entropy(value, labels_B))
        else:
            roots = differentiable(value)
            gradients[number] = gradients[number] or [torch.randn_like(root) for root in roots]
            torch.autograd.backward(roots, gradients[number])
        optimizer.step()
        optimizer.zero_grad()

    for number in range(DIFFERENT):
        step(number)
    dist.barrier()
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < least_s:
        for number in range(DIFFERENT):
            step(number)
        count += DIFFERENT
    taken_s = (time.perf_counter() - start_s) / count
    store = process_group.store()
    store.add("measured", 1)
    while store.add("measured", 0) < plan.num_ranks:  # the others are not done: stay busy
        step(0)
    dist.barrier()
    process_group.leave()
    return taken_s


def least_bytes(rank: int, workload: Workload, plan: Plan) -> list[LeastBytes]:
    """Across each cut of a plan."""
    layers = workload.layers()
    found = []
    for cut in plan.cuts:
        outputs = [_before(layers, cut, workload.input(number)) for number in range(DIFFERENT)]
        features = [_features(output).nbytes for output in outputs]
        coordinates = [o.coords.nbytes if isinstance(o, SparseTensor) else 0 for o in outputs]
        found.append(
            LeastBytes(features=sum(features) / DIFFERENT, coordinates=sum(coordinates) / DIFFERENT)
        )
    return found


def parameter_bytes(rank: int, workload: Workload, plan: Plan) -> list[int]:
    """Of each stage."""
    layers = workload.layers()
    return [
        sum(p.nbytes for n in range(s.layers[0], s.layers[1] + 1) for p in layers[n].parameters())
        for s in plan.stages
    ]


def _optimizer(layers: nn.Module) -> Any:
    parameters = list(layers.parameters())
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9) if parameters else None


def _before(layers: nn.Sequential, cut: int, value: Any) -> Any:
    with torch.no_grad():
        for layer in list(layers)[:cut]:
            value = layer(value)
    return value


def _features(value: Any) -> Tensor:
    return value.feats if isinstance(value, SparseTensor) else value


def _apart(value: Any) -> Any:
    """Cut from its graph, with the kernel maps that are there."""
    feats = _features(value).detach().requires_grad_()
    return value.replace_feats(feats) if isinstance(value, SparseTensor) else feats


def _again(value: Any, *, wants_gradient: bool) -> Any:
    """As it comes from another stage: a leaf, and no kernel maps."""
    return pytree.tree_map(
        lambda x: x.detach().requires_grad_(wants_gradient and x.is_floating_point()), value
    )
