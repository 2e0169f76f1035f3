"""Small modules and data for tests of the pipeline, and how a rank trains them."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from sparsepipe.models.resnet import sparse_resnet
from sparsepipe.models.sparse_unet import sparse_unet
from sparsepipe.models.vgg import sparse_vgg
from sparsepipe.sparse import GlobalAvgPool, SparseTensor
from sparsepipe.strategies import PipelineStrategy

warnings.filterwarnings("ignore")
for _name in ("pytorch_lightning", "lightning_fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)

CLASSES = 4
BATCH = 4


class Dense(Dataset[Any]):
    """Random vectors with labels."""

    def __init__(self, size: int = 4 * BATCH, *, seed: int = 7) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 6, generator=draw)
        self.y = torch.randint(CLASSES, (size,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Images(Dense):
    """Random images of 7 x 10 with labels."""

    def __init__(self, size: int = 4 * BATCH, *, seed: int = 7) -> None:
        super().__init__(size, seed=seed)
        self.x = torch.randn(size, 2, 7, 10, generator=torch.Generator().manual_seed(seed))


class Sparse(Dataset[Any]):
    """Random sites in a grid of 8 with labels."""

    def __init__(self, size: int = 4 * BATCH, *, seed: int = 7) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.sites = [
            torch.unique(torch.randint(8, (60, 3), generator=draw), dim=0) for _ in range(size)
        ]
        self.y = torch.randint(CLASSES, (size,), generator=draw)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.sites[index], self.y[index]


def collate_sparse(items: list[tuple[Tensor, Tensor]]) -> tuple[SparseTensor, Tensor]:
    coords = torch.cat(
        [F.pad(sites, (1, 0), value=number) for number, (sites, _) in enumerate(items)]
    ).int()
    feats = torch.ones(len(coords), 1)
    x = SparseTensor(feats, coords, spatial_shape=(8, 8, 8), batch_size=len(items))
    return x, torch.stack([y for _, y in items])


def dense_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),  # a norm follows: its gradient would be mere rounding
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 12, bias=False),
        nn.BatchNorm1d(12),
        nn.Tanh(),
        nn.Linear(12, CLASSES),
    )


def frozen_layers() -> nn.Sequential:
    """The first ones do not learn."""
    layers = dense_layers()
    layers[:2].requires_grad_(False)
    return layers


def wide_layers() -> nn.Sequential:
    """With 5.8 MiB of parameters amid it: as many as a sum takes another way for."""
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Linear(16, 1200, bias=False),
        nn.BatchNorm1d(1200),
        nn.ReLU(),
        nn.Linear(1200, 1200),
        nn.Tanh(),
        nn.Linear(1200, CLASSES),
    )


def image_layers(*, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.Dropout(dropout) if dropout else nn.ReLU(),
        nn.Conv2d(5, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def sparse_layers() -> nn.Sequential:
    return sparse_vgg(11, CLASSES, width=1 / 16, dropout=0.0)


def residual_layers() -> nn.Sequential:
    return sparse_resnet(18, CLASSES, width=1 / 16)


def unet_layers() -> nn.Sequential:
    """A U-Net whose logits are averaged over each sample: skips of three levels go with it."""
    net = sparse_unet(
        CLASSES, in_channels=1, channels=(6, 8, 8, 6), blocks=(1,) * 4, stem=(3,), stem_channels=4
    )
    return nn.Sequential(*net, GlobalAvgPool())


LAYERS: Mapping[str, Callable[[], nn.Sequential]] = {
    "dense": dense_layers,
    "wide": wide_layers,
    "image": image_layers,
    "sparse": sparse_layers,
    "residual": residual_layers,
    "unet": unet_layers,
}

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Matrices decay, the rest learns more slowly."""
    every = list(parameters)
    matrices = [p for p in every if p.dim() > 1]
    rest = [p for p in every if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": rest, "lr": 0.002, "weight_decay": 0.0}, {"params": matrices}], lr=0.01
    )


class Net(pl.LightningModule):
    """A classifier as anybody writes one."""

    def __init__(
        self,
        layers: nn.Sequential,
        *,
        optimizer: str = "momentum",
        step_size: int = 0,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self._optimizer = optimizer
        self._step_size = step_size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.layers(x if self.dtype == torch.float32 else x.to(self.dtype))
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.layers(x)
        self.val_accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_accuracy", self.val_accuracy)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self.layers(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS.get(self._optimizer, grouped)(self.parameters())
        if not self._step_size:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self._step_size, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_net(net: str, **options: Any) -> Net:
    torch.manual_seed(11)
    return Net(LAYERS[net](), **options)


def make_loader(net: str, *, batches: int, shuffle: bool = False, seed: int = 7) -> DataLoader[Any]:
    if net in ("dense", "wide", "image"):
        data = (Images if net == "image" else Dense)(batches * BATCH, seed=seed)
        return DataLoader(data, batch_size=BATCH, shuffle=shuffle)
    return DataLoader(
        Sparse(batches * BATCH, seed=seed),
        batch_size=BATCH,
        shuffle=shuffle,
        collate_fn=collate_sparse,
    )


class Dealt(DistributedSampler[Any]):
    """Whole batches dealt out in turn; the first readers may have one more."""

    def __init__(self, dataset: Any, *, readers: int, reader: int) -> None:
        super().__init__(dataset, num_replicas=readers, rank=reader)

    def _indices(self) -> list[int]:
        batches = len(self.dataset) // BATCH  # type: ignore[arg-type]
        mine = range(self.rank, batches, self.num_replicas)
        return [b * BATCH + i for b in mine for i in range(BATCH)]

    def __len__(self) -> int:
        return len(self._indices())

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices())


def dealt(batches: int, *, readers: int, reader: int, net: str = "dense") -> DataLoader[Any]:
    """A reader's share of as many batches in all; other ranks may say they are reader 0."""
    whole = make_loader(net, batches=batches)
    sampler = Dealt(whole.dataset, readers=readers, reader=reader)
    return DataLoader(whole.dataset, batch_size=BATCH, sampler=sampler, collate_fn=whole.collate_fn)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def pipeline_trainer(config: str, cuts: list[int], **options: Any) -> pl.Trainer:
    strategy = {
        key: options.pop(key)
        for key in (
            *("mode", "predict_backward", "keyed_randomness", "send_input", "layers"),
            "grids",
        )
        if key in options
    }
    return pl.Trainer(
        **{
            **QUIET,
            "devices": sum(map(int, config.split("-"))),
            "strategy": PipelineStrategy(config=config, cuts=cuts, timeout_s=60, **strategy),
            **options,
        }
    )


def own_node(rank: int, ranks: int, *, accelerator: str) -> dict[str, Any]:
    """What a Trainer is given where each rank is a host of its own with the same device."""
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank))
    return {"accelerator": accelerator, "devices": 1, "num_nodes": ranks}


def plain_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**{**QUIET, "devices": 1, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the host."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def same(found: Tensor, expected: Tensor, *, rounding: float = 0.0) -> bool:
    """Bit for bit, or as near as ``rounding`` times the largest value, on whatever device."""
    found, expected = found.cpu(), expected.cpu()
    if not rounding:
        return torch.equal(found, expected)
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= rounding * expected.double().abs().max())
