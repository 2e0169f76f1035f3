"""Networks of the house that are compared on a grid of ranks with one process, and how."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsepipe import models
from sparsepipe.models import Classifier
from sparsepipe.models.chain import ChainBlock
from sparsepipe.spatial import Grid, spatialize
from sparsepipe.spatial.shard import Shard, local_of, shard_of

CLASSES = 3
GRIDS = {2: {1: (2,), 2: (1, 2), 3: (1, 1, 2)}, 4: {1: (4,), 2: (2, 2), 3: (2, 1, 2)}}
"""By ranks and dimensions."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network, tiny."""

    name: str
    size: tuple[int, ...]
    make: Callable[..., nn.Sequential]
    head: str
    checkpointing: bool

    @property
    def title(self) -> str:
        return f"{self.name} {self.head}{' checkpointing' * self.checkpointing}"


def networks() -> dict[str, tuple[tuple[int, ...], Callable[..., nn.Sequential]]]:
    """Sizes of samples, odd where they may be, and networks, by name."""
    plain = {"width": 0.1, "convolutions": 1, "dropout": 0.3}
    found: dict[str, Any] = {
        "cnn1d": ((37,), partial(models.cnn1d, **plain)),
        "cnn2d": ((13, 18), partial(models.cnn2d, **plain)),
        "cnn3d": ((5, 6, 9), partial(models.cnn3d, **plain)),
        "fcn2d": ((35, 66), partial(models.fcn2d, in_channels=1, width=0.03, dropout=0.3)),
        "unet3d": ((6, 5, 9), partial(models.unet3d, width=0.1, levels=3, dropout=0.3)),
        "convnext_tiny": (
            (35, 66),
            partial(
                models.convnext_tiny,
                in_channels=1,
                width=0.05,
                blocks=(1, 1, 2, 1),
                stochastic_depth=0.5,
            ),
        ),
        "densenet3d": (
            (9, 8, 17),
            partial(models.densenet3d, width=0.1, blocks=(1, 2), dropout=0.3),
        ),
    }
    return found


def cases() -> Iterator[Case]:
    """Each network with both heads, with and without checkpointing."""
    for name, (size, make) in networks().items():
        for head, again in itertools.product(("classification", "segmentation"), (False, True)):
            yield Case(name, size, make, head, again)


def errors(rank: int, ranks: int, plain: bool, device: str = "cpu") -> dict[str, float]:
    torch.set_num_threads(1)
    compare = _of_network if plain else _of_step
    grids = {dimensions: Grid(shape) for dimensions, shape in GRIDS[ranks].items()}
    with torch.device(device):
        return {case.title: compare(case, grids[len(case.size)]) for case in cases()}


def error_with_empty_shards(rank: int) -> float:
    def make(classes: int, *, head: str, checkpointing: bool = False) -> nn.Sequential:
        convolution = nn.Conv1d(1, classes, 3, padding=1)
        layers = convolution, nn.BatchNorm1d(classes), nn.ReLU(), nn.Upsample(1)
        block = ChainBlock(*layers, checkpointing=checkpointing)
        return nn.Sequential(block, nn.AdaptiveAvgPool1d(1), nn.Flatten())

    return _of_network(Case("block", (3,), make, "classification", True), Grid((2,)))


def error_with_deep_supervision(rank: int) -> float:
    make = partial(models.unet3d, width=0.1, levels=3, dropout=0.3, deep_supervision=True)
    return _of_step(Case("unet3d", (6, 5, 9), make, "segmentation", True), Grid(GRIDS[2][3]))


def _made(case: Case) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    net = case.make(CLASSES, head=case.head, checkpointing=case.checkpointing).double()
    alone = case.make(CLASSES, head=case.head).double()
    for parameter in net.parameters():  # some begin at zero
        parameter.data.add_(torch.randn_like(parameter) / math.sqrt(max(parameter[0].numel(), 4)))
    alone.load_state_dict(net.state_dict())
    return net, alone


def _of_network(case: Case, grid: Grid) -> float:
    net, alone = _made(case)
    whole = torch.randn(2, 1, *case.size, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    expected = alone(whole)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    local = grid.shard(whole).detach().clone().requires_grad_()
    spatialize(net, grid)
    torch.manual_seed(1)
    output = net(local)
    is_whole = case.head == "classification"
    (output * (weights if is_whole else grid.shard(weights))).sum().backward()
    found = output.detach() if is_whole else grid.gather(output.detach())
    assert local.grad is not None
    pairs = [(found, expected), (grid.gather(local.grad), whole.grad)]
    return max(_relative(*pair) for pair in [*pairs, *_learnt(net, alone)])


def _of_step(case: Case, grid: Grid) -> float:
    net, alone = (_classifier(each) for each in _made(case))
    torch.manual_seed(2)
    label_size = case.size if case.head == "segmentation" else ()
    batch = {
        "input": torch.randn(2, 1, *case.size, dtype=torch.float64),
        "label": torch.randint(CLASSES, (2, *label_size)),
        "index": torch.arange(2),
    }
    if label_size:
        batch["label"][torch.rand(2, *label_size) < 0.1] = -100
    shards = {name: _cut(grid, each, len(case.size)) for name, each in batch.items()}
    if label_size:
        batch["spacing"] = torch.tensor([[0.5, 2.0, 1.5][: len(case.size)]] * 2)
        shards["spacing"] = batch["spacing"]
    spatialize(net.layers, grid)
    pairs = []
    for module, given in ((net, shards), (alone, batch)):
        torch.manual_seed(1)
        loss = module.training_step(given, 0)["loss"]
        # Every rank has the loss of the whole, and a share of its gradient.
        (loss / (grid.size if module is net else 1)).backward()
        module.eval()
        with torch.no_grad():
            module.validation_step(given, 0)
            module.test_step(given, 0)
            predicted = module.predict_step(given)
        metrics = (module.train_accuracy, module.val_accuracy, module.confusion)
        values = [loss, *(metric.compute().double() for metric in metrics)]
        if label_size:
            values += [module.val_iou.compute(), predicted["prediction"], predicted["probability"]]
            values += [each.nan_to_num() for each in module.cases.compute().values()]
            slices = [each for case in module.cases.drawn for each in case["slices"]]
            names = ("image", "label", "prediction")
            values += [torch.from_numpy(each[name]) for each in slices for name in names]
        else:
            values.append(predicted["probability"])
        pairs.append([_whole(grid, each.detach()) for each in values])
    return max(_relative(*pair) for pair in [*zip(*pairs, strict=True), *_learnt(net, alone)])


def _classifier(layers: nn.Sequential) -> Classifier:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    loss = {"label_smoothing": 0.1, "class_weights": (0.5, 2.0, 1.0), "lovasz": 0.7, "dice": 0.4}
    module = Classifier(layers, num_classes=CLASSES, optimizer=optimizer, **loss)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    metrics = module.train_accuracy, module.val_accuracy, module.val_iou, module.confusion
    for metric in (*metrics, module.cases):
        metric.sync_on_compute = False  # each rank counts the whole
    return module


def _cut(grid: Grid, value: Tensor, dimensions: int) -> Tensor:
    if value.dim() <= dimensions:
        return value
    full = value.shape[-dimensions:]
    return shard_of(grid.shard(value), grid, range(-dimensions, 0), full)


def _whole(grid: Grid, value: Tensor) -> Tensor:
    return grid.gather(local_of(value)) if isinstance(value, Shard) else value


def _learnt(net: nn.Module, alone: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        dist.all_reduce(mine.grad)
        pairs.append((mine.grad, theirs.grad))
    return [*pairs, *zip(net.buffers(), alone.buffers(), strict=True)]


def _relative(mine: Tensor, theirs: Tensor | None) -> float:
    assert theirs is not None
    assert mine.shape == theirs.shape
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return float((mine - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-2)
