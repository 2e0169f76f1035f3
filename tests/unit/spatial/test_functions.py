"""Functions of the whole sample equal one process, in values and gradients, on any cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Accuracy, JaccardIndex, MeanSquaredError
from torchmetrics.segmentation import DiceScore

from sparsepipe.models.metrics import confusion_of
from sparsepipe.spatial import Grid, Shard
from sparsepipe.spatial.shard import shard_of, whole
from tests.support.processes import run_shared

CUTS = [((3,), (2, 4, 7)), ((3,), (1, 4, 1)), ((2, 2), (1, 4, 5, 3)), ((1, 2, 2), (2, 4, 3, 2, 1))]


def labels(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + (x[:, 0] > 1).long()


def measured(x: Tensor) -> list[Tensor]:
    found = []
    for metric, given in (
        (Accuracy("multiclass", num_classes=4), (x, labels(x))),
        (JaccardIndex("multiclass", num_classes=4), (x, labels(x))),
        (DiceScore(4, input_format="index"), (x.argmax(1), labels(x))),
        (MeanSquaredError().set_dtype(torch.float64), (x, x.flip(-1))),
    ):
        metric.distributed_available_fn = lambda: False  # each rank counts the whole
        found.append(metric(*given))
        metric.update(*(each.flip(0) for each in given))
        found.append(metric.compute())
    return found


def masked(x: Tensor) -> list[Tensor]:
    y = x * 1
    y[x > 1] = 2.0
    y[..., 0] = x[..., -1] * 2
    return [y, x[x > 0], x[:, 0][labels(x) == 1], x.masked_select(x > 0), x * (x > 0)]


def dice(x: Tensor) -> Tensor:
    shares, targets = x.softmax(1), F.one_hot(labels(x), 4).movedim(-1, 1)
    dims = tuple(range(2, x.dim()))
    return 1 - 2 * (shares * targets).sum(dims) / (shares + targets).sum(dims)


def shuffled(x: Tensor) -> list[Tensor]:
    if x.dim() == 4:
        x = F.pixel_shuffle(x, 2)
    place = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype).expand_as(x[:, :1])
    with_places = torch.cat([x, place, torch.ones_like(place)], 1)
    return [with_places, with_places.mean(), F.group_norm(with_places, 1), torch.rand_like(x)]


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "spread": lambda x: (x.var(), x.std(False), x.std(1), torch.var_mean(x, (1, -1), correction=0)),
    "norms": lambda x: (x.norm(), x.norm(2, -1), torch.linalg.vector_norm(x, dim=1)),
    "extremes": lambda x: (x.amin(), x.min(-1), x.max(1), x.amax(-1, True), torch.min(x, -x)),
    "order": lambda x: (x.sort(), x.topk(1, 1), x.argmax(), x.median(-1), x.quantile(0.3)),
    "sums": lambda x: (x.prod(-1), x.logsumexp(-1), x.cumsum(-1), x.sum(-1), x.mean(axis=1)),
    "truth": lambda x: ((x > 0).any(), (x > 3).all(-1), torch.count_nonzero(x > 0, 1)),
    "pieces": lambda x: (x[..., 1:], x[..., -1], x[:, None, ..., ::2], x.narrow(-1, 0, 1), x[0]),
    "picked": lambda x: (x.select(-1, 0), x.unbind(1), x[:, [2, 0]], x.chunk(2, -1), x[..., :0]),
    "turned": lambda x: (x.flip(-1), x.roll(1, -1), x.transpose(1, -1)[:, -1:].std(0)),
    "joined": lambda x: (torch.cat([x, x[..., :1]], -1), x.repeat(1, 2, *[1] * (x.dim() - 2))),
    "broadcast": lambda x: (x * x[..., :1], x[:, :1].expand_as(x), F.mse_loss(x, x.detach()[:1])),
    "differences": lambda x: (x[..., 1:] - x[..., :-1], x[..., 1:].abs().sum() + x.diff().sum()),
    "normalised": lambda x: ((x - x.mean()) / (x.std() + 1), (x - x.amin()) / (x.amax() + 1)),
    "layers": lambda x: (F.layer_norm(x, x.shape[1:]), x.softmax(-1), F.normalize(x, dim=-1)),
    "views": lambda x: (x.view(size=x.shape), x.view_as(other=x), torch.flatten(input=x)),
    "weights of classes": lambda x: torch.arange(3.0)[labels(x)],
    "weighted": lambda x: (F.mse_loss(x, x.detach() * 2, weight=x.detach().exp()),),
    "focal": lambda x: F.cross_entropy(x, labels(x), reduction="none")[labels(x) > 0].square(),
    "masked": masked,
    "dice": dice,
    "shuffled": shuffled,
    "metrics": measured,
    "not finite": lambda x: confusion_of(x / (x > -1), labels(x)),
}


def unequal(rank: int, shape: tuple[int, ...], size: tuple[int, ...]) -> list[str]:
    grid, found = Grid(shape), []
    for name, function in FUNCTIONS.items():
        torch.manual_seed(0)
        alone = torch.randn(size, dtype=torch.float64, requires_grad=True)
        local = grid.part(alone.detach()).clone().requires_grad_()
        shard = shard_of(local, grid, range(-grid.dimensions, 0), size[-grid.dimensions :])
        torch.manual_seed(1)
        expected = [each for each in tree_leaves(function(alone)) if isinstance(each, Tensor)]
        torch.manual_seed(1)
        results = [each for each in tree_leaves(function(shard)) if isinstance(each, Tensor)]
        results = [whole(each) if isinstance(each, Shard) else each for each in results]
        weights = [torch.randn(each.shape, dtype=torch.float64) for each in expected]
        pairs = list(zip(results, expected, strict=True))
        losses = [
            sum((a * b).sum() for a, b in zip(each, weights, strict=True) if a.requires_grad)
            for each in (results, expected)
        ]
        if isinstance(losses[1], Tensor):
            (gradient,) = torch.autograd.grad(losses[0] / grid.size, local)
            pairs.append((gradient, grid.part(torch.autograd.grad(losses[1], alone)[0])))
        if not all(
            a.shape == b.shape
            and torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-10, equal_nan=True)
            for a, b in pairs
        ):
            found.append(name)
    return found


@pytest.mark.parametrize(("shape", "size"), CUTS, ids=str)
def test_functions_equal_one_process(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    assert run_shared(unequal, math.prod(shape), shape, size) == [[]] * math.prod(shape)


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, torch.ones(2, 1, 1, dtype=x.dtype)], 1),
    "cat of shards": lambda x: torch.cat([x, x[..., :1]], 1),
    "labels": lambda x: F.cross_entropy(x, torch.zeros(2, 1, dtype=torch.long)),
    "targets": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(2, 4, 1, dtype=x.dtype)),
    "loss of shards": lambda x: F.mse_loss(x, x[..., :2]),
    "index": lambda x: x[..., 5],
    "classes": lambda x: F.one_hot((x > x.amax() - 1e-9).long() * 3, 3),
    "in place": lambda x: x[..., :1].mul_(x),
    "padding": lambda x: F.pad(x, (11, 0), "reflect"),
}


def refusals(rank: int) -> dict[str, str]:
    grid, found = Grid((3,)), {}
    torch.manual_seed(0)
    x = shard_of(grid.part(torch.randn(2, 4, 4, dtype=torch.float64)), grid, (-1,), (4,))
    for name, function in WRONG.items():
        with pytest.raises((RuntimeError, ValueError, IndexError)) as error:  # or a ConfigError
            function(x)
        found[name] = type(error.value).__name__
    return found


def test_what_one_process_refuses_raises_on_every_rank() -> None:
    first, *others = run_shared(refusals, 3)
    assert "TransportError" not in first.values()
    assert others == [first, first]
