"""What a run says that it keeps, beside what torch saves when microbatches really go forward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sparsepipe.experiment.kept_memory import kept_bytes
from sparsepipe.experiment.schedules import Synchronous
from sparsepipe.models import cnn_5x5
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.profiling.saved import border_bytes, saved_bytes
from sparsepipe.schedule import Plan

CUT, BATCH, PARTS = 7, 32, 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return cnn_5x5(10, convolutions=6, width=0.25)


def profiled(layers: nn.Sequential, x: Tensor) -> Profile:
    """Its bytes; times do not matter."""
    saved, (begins, ends) = saved_bytes(layers, x), border_bytes(layers, x)
    return Profile(
        layers=tuple(
            LayerProfile(
                index=index,
                name=str(index),
                kind=type(layer).__name__,
                forward_s=1.0,
                backward_s=2.0,
                activation_bytes=0.0,
                parameter_bytes=float(sum(p.nbytes for p in layer.parameters())),
                saved_bytes=saved[index],
                begin_bytes=begins[index],
                end_bytes=ends[index],
            )
            for index, layer in enumerate(layers)
        )
    )


def saved_by(stage: nn.Sequential, parts: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """Bytes of the storages that microbatches keep, beside parameters; and what they give."""
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [stage(part) for part in parts]
    sizes = (t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    return sum(sizes), outputs


@pytest.mark.parametrize(("schedule", "flying"), [("gpipe", (PARTS, PARTS)), ("1f1b", (2, 1))])
def test_it_is_what_torch_saves_of_the_microbatches_in_flight(
    schedule: str, flying: tuple[int, int]
) -> None:
    layers, x = network(), torch.rand(BATCH, 1, 28, 28)
    plan = Plan.of(config="1-1", cuts=(CUT,), num_layers=len(layers))
    profile = profiled(layers, x)
    names = {device: profile for stage in plan.stages for device in stage.devices}
    told = kept_bytes(
        plan, names, MemoryModel(stash=False, gradients=0.0), Synchronous(schedule, PARTS)
    )
    parts: list[Tensor] = [part.clone() for part in x.chunk(PARTS)]
    for stage, (first, end) in enumerate([(0, CUT), (CUT, len(layers))]):
        own = nn.Sequential(*list(layers)[first:end])
        weights = 2 * sum(p.nbytes for p in own.parameters())  # and momentum
        saved, _ = saved_by(own, parts[: flying[stage]])
        _, outputs = saved_by(own, parts)
        parts = [output.detach().requires_grad_() for output in outputs]
        assert told[stage] == pytest.approx(weights + saved, rel=0.1)
