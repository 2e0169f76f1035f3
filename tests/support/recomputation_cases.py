"""Networks that are run with recomputation and without, and what is left of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsepipe.models.vgg import sparse_vgg
from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.sparse import (
    BatchNorm,
    Conv3d,
    Dropout,
    GlobalAvgPool,
)
from tests.support.weights_cases import CASES, Case, assert_same, sparse_batch

CPU = torch.device("cpu")


def sparse_with_dropout() -> nn.Sequential:
    """The first two levels of a VGG, and its end."""
    layers = list(sparse_vgg(11, 3, width=0.05, dropout=0.5))
    nested = nn.Sequential(Conv3d(3, 3, 1), BatchNorm(3), Dropout(0.5))
    return nn.Sequential(*layers[:3], nested, *layers[3:8], GlobalAvgPool(), Dropout(0.2))


def dense_with_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.BatchNorm3d(4, momentum=None),
        nn.ReLU(inplace=True),
        nn.Dropout3d(0.5),
        nn.InstanceNorm3d(4, affine=True, track_running_stats=True),
        nn.Conv3d(4, 6, 2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(6 * 27, 3),
    )


NETS = {
    **CASES,
    "dense dropout": Case(dense_with_dropout, CASES["conv"].batch),
    "sparse dropout": Case(sparse_with_dropout, sparse_batch),
}


@dataclass
class Ran:
    """What is left after some minibatches have gone through a stage, forward and backward."""

    outputs: list[Tensor]
    upstream: dict[str, Tensor | None]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generators: list[Tensor]


def generators(device: torch.device) -> list[Tensor]:
    """The states of the host's generator and of the device's own."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def spans_of(*bounds: tuple[int, int]) -> list[range]:
    return [range(first, end) for first, end in bounds]


def wanting(value: Any) -> Any:
    """The same with a gradient wanted for what is floating, as between stages."""
    return pytree.tree_map(
        lambda leaf: leaf.requires_grad_() if leaf.is_floating_point() else leaf, value
    )


def ran(
    case: Case,
    recomputed: Sequence[range],
    *,
    order: str = "F0 F1 B0 B1",
    keyed: bool = False,
    values: Sequence[Any] | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> Ran:
    """Several minibatches in flight on one set of leaves, as a synchronous schedule has them."""
    network = case.fresh().to(device)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    randomness = KeyedRandomness(seed=3, device=device) if keyed else None
    stage = StageLayers(
        network,
        network,
        first=0,
        last=len(network) - 1,
        randomness=randomness,
        recomputed=recomputed,
        **options,
    )
    torch.manual_seed(11)
    flights, outputs, upstream = {}, [], {}
    for action in order.split():
        number = int(action[1:])
        if action[0] == "F":
            value = case.batch(number) if values is None else values[number]
            value = wanting(value.to(device))
            flights[number] = stage.forward(value, minibatch=number, leaves=leaves)
            outputs.append(flights[number].output)
        else:
            slope = torch.linspace(-1, 2, outputs[number].numel(), device=device)
            (given,) = flights[number].backward([slope.view_as(outputs[number])], leaves=leaves)
            upstream[str(number)] = given
    return Ran(
        outputs=outputs,
        upstream=upstream,
        gradients={name: leaf.grad for name, leaf in leaves.items()},
        buffers=dict(network.named_buffers()),
        generators=generators(device),
    )


def assert_equal(found: Ran, expected: Ran) -> None:
    """Bit for bit."""
    assert all(map(torch.equal, found.outputs, expected.outputs))
    assert_same(found.upstream, expected.upstream)
    assert_same(found.gradients, expected.gradients)
    assert_same(found.buffers, expected.buffers)
    assert all(map(torch.equal, found.generators, expected.generators))


def choices(length: int) -> dict[str, list[range]]:
    return {
        "all": spans_of((0, length)),
        "two": spans_of((0, 4), (4, length)),
        "inner": spans_of((1, 4)),
        "each": [range(i, i + 1) for i in range(length)],
    }
