"""Models on shards under autocast, activation checkpointing, copying and without gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsepipe.spatial import Grid, spatialize, unspatialize
from tests.support.processes import run_shared
from tests.support.spatial_cases import rounding_errors
from tests.support.spatial_nets import Classifier2d, UNet

BOUND = 1e-12
ROUNDING = 2.0**-6
"""Of bfloat16, which has 8 bits: a few roundings of the largest value."""


def compared(alone: nn.Module, spatial: nn.Module, grid: Grid, whole: Tensor) -> dict[str, float]:
    expected = alone(whole)
    expected.square().sum().backward()
    output = spatial(grid.shard(whole).clone().requires_grad_())
    output.square().sum().backward()
    if output.dim() > grid.dimensions:
        output = grid.gather(output)
    found = {"output": float((output - expected).abs().max())}
    largest = max(float(each.grad.abs().max()) for each in alone.parameters() if each.requires_grad)
    for (name, theirs), mine in zip(alone.named_parameters(), spatial.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        dist.all_reduce(mine.grad)
        found[name] = float((mine.grad - theirs.grad).abs().max() / largest)
    for (name, theirs), mine in zip(alone.named_buffers(), spatial.buffers(), strict=True):
        found[name] = float((mine - theirs).abs().max())
    return found


def sample(*size: int) -> Tensor:
    return torch.randn(2, *size, dtype=torch.float64)


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = layers, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layers, x, use_reentrant=self.use_reentrant)
        return output


@pytest.mark.full
def test_layers_under_autocast_equal_one_process_up_to_rounding() -> None:
    for found in run_shared(rounding_errors, 2, (1, 2)):
        assert len(found) > 100
        assert {name: error for name, error in found.items() if not error <= ROUNDING} == {}


def autocast_errors(rank: int) -> tuple[dict[str, float], set[torch.dtype]]:
    """A step in bfloat16 beside one in single precision, of one process and of shards."""
    grid, dtypes, losses = Grid((1, 2)), set(), []
    torch.manual_seed(0)
    model = Classifier2d()
    whole, labels = torch.randn(8, 3, 16, 20), torch.arange(8) % 4
    found = {}
    for name, x in (("alone", whole), ("spatial", grid.shard(whole))):
        step = copy.deepcopy(model)
        if name == "spatial":
            spatialize(step, grid)
        with torch.autocast("cpu", torch.bfloat16):
            output = step(x)
            loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        dtypes.add(output.dtype)
        losses.append(float(loss))
        gradients = [each.grad for each in step.parameters() if each.grad is not None]
        if name == "spatial":
            for gradient in gradients:
                dist.all_reduce(gradient)
        found[name] = torch.cat([each.flatten() for each in gradients])
    gap = (found["spatial"] - found["alone"]).norm() / found["alone"].norm()
    return {"loss": abs(losses[0] - losses[1]), "gradient": float(gap)}, dtypes


def test_a_model_trains_under_autocast() -> None:
    for found, dtypes in run_shared(autocast_errors, 2):
        assert dtypes == {torch.bfloat16}
        assert found["loss"] < 0.02
        assert found["gradient"] < 0.05


def errors_without_gradients(rank: int) -> list[float]:
    torch.manual_seed(0)
    model, grid, whole = UNet().double(), Grid((1, 1, 2)), sample(2, 4, 6, 8)
    expected = copy.deepcopy(model)(whole)
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        for training in (True, False):
            alone = copy.deepcopy(model).train(training)
            spatial = spatialize(copy.deepcopy(model).train(training), grid)
            with context():
                expected = alone(whole)
                output = spatial(grid.shard(whole))
                assert not output.requires_grad
                found.append(float((grid.gather(output) - expected).abs().max()))
    return found


def test_forwards_without_gradients_equal_one_process() -> None:
    assert max(max(found) for found in run_shared(errors_without_gradients, 2)) < BOUND


def copies(rank: int) -> dict[str, float]:
    torch.manual_seed(0)
    alone, grid = Classifier2d().double(), Grid((1, 2))
    model = spatialize(copy.deepcopy(alone), grid)
    assert model.state_dict().keys() == alone.state_dict().keys()
    whole = sample(3, 8, 10)
    found = {}
    copied = copy.deepcopy(model)
    found |= {
        f"copy {k}": v for k, v in compared(copy.deepcopy(alone), copied, grid, whole).items()
    }
    untouched = model.features[1]
    assert isinstance(untouched, nn.BatchNorm2d)
    assert int(untouched.num_batches_tracked or 0) == 0, "the copy has its own buffers"

    expected = copy.deepcopy(alone)(whole)
    for name, plain in {
        "pickled": pickle.loads(pickle.dumps(model)),
        "undone": unspatialize(model),
        "pickled again": pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model)))),
    }.items():
        assert plain.state_dict().keys() == alone.state_dict().keys()
        found[name] = float((plain(whole) - expected).abs().max())
    assert all("forward" not in vars(module) for module in model.modules())
    again = spatialize(spatialize(model, grid), grid)
    again.load_state_dict(alone.state_dict())
    found |= {f"again {k}": v for k, v in compared(alone, again, grid, whole).items()}
    return found


def test_copies_stay_spatial_and_what_is_pickled_or_undone_is_plain() -> None:
    for found in run_shared(copies, 2):
        assert max(found.values()) < BOUND, found


def own_forward(rank: int) -> tuple[bool, bool]:
    """Whether a module's own attribute ``forward`` is called, and is there when all is undone."""
    called = []
    norm = nn.BatchNorm2d(3)
    plain = norm.forward

    def noting(x: Tensor) -> Tensor:
        called.append(x)
        return plain(x)

    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(norm))
    model[1].forward = noting  # type: ignore[method-assign]
    grid = Grid((1, 2))
    spatialize(model, grid)(torch.randn(2, 3, 4, 4))
    unspatialize(model)
    return len(called) == 1, model[1].forward is noting


def test_a_forward_that_somebody_has_replaced_is_kept() -> None:
    assert run_shared(own_forward, 2) == [(True, True)] * 2


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Whole(nn.Module):
    """A bottleneck that needs the whole sample; losses compare what it gives with shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * 4 * 6, 3 * 4 * 6)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layer(x.flatten(1)).view(-1, 3, 4, 6)
        loss: Tensor = F.cross_entropy(logits, x[:, 0].round().long().clamp(0, 2))
        return loss + F.mse_loss(logits[:, :2], x)


def in_a_row(use_reentrant: bool) -> nn.Module:
    blocks = (nn.Sequential(nn.Conv2d(2, 2, 3, 2, 1), nn.BatchNorm2d(2)) for _ in range(2))
    return nn.Sequential(*(Checkpointed(each, use_reentrant=use_reentrant) for each in blocks))


def of_all(use_reentrant: bool) -> nn.Module:
    return nn.Sequential(Checkpointed(UNet(), use_reentrant=use_reentrant))


def hooked() -> nn.Module:
    model = UNet()
    for layer in (model.pool, model.down[0]):
        layer.register_full_backward_hook(lambda *_: None)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "losses of what all ranks have and shards": (Whole, (2, 4, 6)),
    "a subclass with a forward": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), NormAndActivation(3)),
        (2, 6, 8),
    ),
    "hooks of modules": (hooked, (2, 4, 6, 8)),
    "checkpoints in a row": (partial(in_a_row, False), (2, 9, 7)),
    "reentrant checkpoints in a row": (partial(in_a_row, True), (2, 9, 7)),
    "checkpoint": (partial(of_all, False), (2, 4, 6, 8)),
    "reentrant checkpoint": (partial(of_all, True), (2, 4, 6, 8)),
}


def model_error(rank: int, name: str) -> float:
    torch.manual_seed(0)
    make, size = MODELS[name]
    model, grid = make().double(), Grid((*[1] * (len(size) - 2), 2))
    alone = copy.deepcopy(model)
    for each in alone.modules():
        if isinstance(each, Checkpointed):  # which would count batches twice in its norms
            each.forward = each.layers.forward  # type: ignore[method-assign]
    return max(compared(alone, spatialize(model, grid), grid, sample(*size)).values())


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_process(name: str) -> None:
    assert max(run_shared(model_error, 2, name)) < BOUND
