"""What the pipeline benchmark trains: VGGs, a CNN on images, and layers that sleep.

Shapes: B shapes in a minibatch, C channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from sparsepipe.models import Classifier, cnn_5x5
from sparsepipe.models.vgg import dense_vgg, sparse_vgg
from sparsepipe.sparse import Backend, SparseTensor, sparse_collate

CLASSES = 10
DIFFERENT = 6
"""Minibatches that differ; more of them repeat these."""


class Workload(Protocol):
    """A network and its data."""

    @property
    def batch_size(self) -> int:
        """B."""

    def layers(self) -> nn.Sequential:
        """The network, the same at each call."""

    def input(self, number: int) -> Any:
        """The input of minibatch ``number``, without anything that was computed from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vgg:
    """VGG with batch norm on surfaces of ellipsoids that span the grid.

    Args:
        sparse: or dense.
        depth: 11, 13, 16 or 19.
        width: multiplies all channels.
        resolution: of the grid.
        points: on each surface.
        batch_size: B.
        dropout: before the linear layers.
        backend: of sparse layers; None: the default one.
    """

    sparse: bool
    depth: int
    width: float
    resolution: int
    points: int
    batch_size: int
    dropout: float = 0.5
    backend: Backend | None = None

    def __str__(self) -> str:
        kind = "sparse" if self.sparse else "dense"
        return (
            f"{kind} VGG{self.depth}-BN of width {self.width:g}, {self.resolution}^3, "
            f"{self.batch_size} shapes of {self.points} points a minibatch"
        )

    def layers(self) -> nn.Sequential:
        torch.manual_seed(0)
        vgg: Callable[..., nn.Sequential] = dense_vgg
        if self.sparse:
            vgg = partial(sparse_vgg, backend=self.backend)
        return vgg(self.depth, CLASSES, width=self.width, dropout=self.dropout)

    def input(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number % DIFFERENT)
        sites = [self._sites(generator) for _ in range(self.batch_size)]
        if self.sparse:
            samples = [(s, torch.ones(len(s), 1)) for s in sites]
            return sparse_collate(samples, spatial_shape=(self.resolution,) * 3)
        dense = torch.zeros(self.batch_size, 1, *(self.resolution,) * 3)
        for number_in_batch, (x, y, z) in enumerate(s.unbind(1) for s in sites):
            dense[number_in_batch, 0, x, y, z] = 1
        return dense

    def _sites(self, generator: torch.Generator) -> Tensor:
        """Occupied voxels [N, 3] of a shape."""
        points = torch.randn(self.points, 3, generator=generator)
        points /= points.norm(dim=1, keepdim=True)
        size_3 = 0.6 + 0.4 * torch.rand(3, generator=generator)
        voxels = ((points * size_3 + 1) / 2 * self.resolution).long()
        sites: Tensor = torch.unique(voxels.clamp(max=self.resolution - 1), dim=0)
        return sites


class _Nap(torch.autograd.Function):
    """The same values, after a while; the same with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient.clone(), gradient.new_zeros(1), None, None


class Sleep(nn.Module):
    """A layer that takes time and no processor.

    Args:
        forward_s: of the forward pass.
        backward_s: of the backward pass.
    """

    def __init__(self, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self._durations_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Nap.apply(x, self.bias, *self._durations_s))  # type: ignore[no-untyped-call]


class FirstColumns(nn.Module):
    """Logits [B, K] from the first columns of an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :CLASSES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeping:
    """A layer that sleeps for each stage, between activations of a given size.

    Args:
        stages: how many.
        forward_ms: of each layer.
        backward_ms: of each layer.
        kib: of an activation, and of its gradient.
    """

    stages: int
    forward_ms: float
    backward_ms: float
    kib: int

    batch_size = 8

    def __str__(self) -> str:
        return (
            f"{self.stages} stages that sleep {self.forward_ms:g} ms forward and "
            f"{self.backward_ms:g} ms backward, activations of {self.kib} KiB"
        )

    def layers(self) -> nn.Sequential:
        naps = [
            Sleep(forward_s=self.forward_ms / 1000, backward_s=self.backward_ms / 1000)
            for _ in range(self.stages)
        ]
        return nn.Sequential(*naps, FirstColumns())

    def input(self, number: int) -> Any:
        return torch.zeros(self.batch_size, self.kib * 1024 // 4 // self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """A ``cnn_5x5``, as in the study of depth, on noise: what it learns takes no other time.

    Args:
        convolutions: of the network.
        width: multiplies its channels.
        batch_size: B.
    """

    convolutions: int
    width: float
    batch_size: int

    def __str__(self) -> str:
        return (
            f"CNN of {self.convolutions} 5x5 convolutions, width {self.width:g}, "
            f"{self.batch_size} images of 28x28 a minibatch"
        )

    def layers(self) -> nn.Sequential:
        torch.manual_seed(0)
        return cnn_5x5(CLASSES, convolutions=self.convolutions, width=self.width)

    def input(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number % DIFFERENT)
        return torch.rand(self.batch_size, 1, 28, 28, generator=generator)


class Minibatches(Dataset[Any]):
    """Minibatches that lie ready: reading and voxelising shapes are not measured here.

    Args:
        workload: makes them.
        count: how many an epoch has.
    """

    def __init__(self, workload: Workload, count: int) -> None:
        self._inputs = [workload.input(number) for number in range(min(count, DIFFERENT))]
        self._count = count
        self._size = workload.batch_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        index_B = torch.arange(self._size) + number * self._size
        x = fresh(self._inputs[number % DIFFERENT])
        return {"input": x, "label": index_B % CLASSES, "index": index_B}


def fresh(x: Any) -> Any:
    """The same input without the kernel maps that were made from it."""
    if not isinstance(x, SparseTensor):
        return x
    return SparseTensor(
        x.feats, x.coords, spatial_shape=x.spatial_shape, batch_size=x.batch_size, stride=x.stride
    )


def loader(workload: Workload, count: int) -> DataLoader[Any]:
    """Batches as a Trainer reads them, without processes of its own."""
    return DataLoader(Minibatches(workload, count), batch_size=None)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What all rows train with."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def module(workload: Workload) -> Classifier:
    """The classifier that users train."""
    return Classifier(workload.layers(), num_classes=CLASSES, optimizer=sgd)


class LossAlone(pl.LightningModule):
    """The least that can be trained: no metrics and no logs, which a plain loop has not either.

    Args:
        workload: whose network it is.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.layers = workload.layers()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch["input"]), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())
