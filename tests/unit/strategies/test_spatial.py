"""Spatial parallelism in Lightning equals a plain Trainer on whole samples, in double precision."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from sparsepipe.callbacks import WriteShards
from sparsepipe.errors import ConfigError
from sparsepipe.spatial.grid import best_grid
from sparsepipe.spatial.spatialize import _SpatialForward
from sparsepipe.strategies import SpatialStrategy, check_grid
from tests.support.pipeline_cases import QUIET, own_node
from tests.support.processes import run, run_shared

SIZES = (10, 12)
SAMPLES, BATCH, STEPS = 32, 2, 8
BOUND = 1e-10


class Images(Dataset[dict[str, Any]]):
    """Random images with a class for each pixel and one for the whole.

    Args:
        in_parts: whether it can read a part of each.
        shift: added to all, by which data sets differ.
    """

    def __init__(self, *, in_parts: bool = False, shift: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 3, *SIZES, generator=generator, dtype=torch.float64) + shift
        self.pixels = torch.randint(4, (SAMPLES, *SIZES), generator=generator)
        self.label = torch.randint(4, (SAMPLES,), generator=generator)
        self._part: tuple[slice, ...] = (slice(None), slice(None))
        if in_parts:
            self.sample_sizes = SIZES
            self.read_part = self._read_part

    def _read_part(self, slices: tuple[slice, ...]) -> None:
        self._part = slices

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "input": self.x[index][(slice(None), *self._part)],
            "pixels": self.pixels[index][self._part],
            "label": self.label[index],
            "index": torch.tensor(index),
        }


class Block(nn.Module):
    def __init__(self, channels: int, *, recompute: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.2)
        self._recompute = recompute

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.relu(self.norm(self.convolution(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self._recompute and self.training:
            result: Tensor = checkpoint(self._compute, x, use_reentrant=False)
            return result
        return self._compute(x)


class Net(pl.LightningModule):
    """Somebody's own network: a small U-Net with a class for each pixel and one for the image."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 5, padding=2)
        self.down = nn.Sequential(nn.MaxPool2d(2), Block(6, recompute=recompute))
        self.up = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.last = nn.Conv2d(12, 4, 1)
        self.head = nn.Linear(6, 4)
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.confusion = MulticlassConfusionMatrix(4)
        self.counts: Tensor | None = None
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        high = F.relu(self.first(x))
        low = self.down(high)
        pixels = self.last(torch.cat([high, self.up(low)], 1))
        return pixels, self.head(low.mean((2, 3)))

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        pixels, logits = self(batch["input"])
        loss = F.cross_entropy(pixels, batch["pixels"]) + F.cross_entropy(logits, batch["label"])
        return loss, logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("train", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, logits = self._loss(batch)
        self.accuracy(logits, batch["label"])
        self.confusion.update(logits, batch["label"])
        self.log("loss", loss, sync_dist=True)
        self.log("samples", float(len(logits)), reduce_fx="sum", sync_dist=True, batch_size=1)
        self.log("accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        self.counts = self.confusion.compute()
        self.confusion.reset()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        pixels: Tensor = self(batch["input"])[0]
        return pixels

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def loaders(replicas: int, replica: int, *, in_parts: bool = False) -> list[DataLoader[Any]]:
    """Of training and of evaluation: minibatches of all replicas together are the same."""
    found: list[DataLoader[Any]] = []
    for data in (Images(in_parts=in_parts), Images(in_parts=in_parts, shift=0.5)):
        sampler = DistributedSampler(data, replicas, replica, shuffle=False)
        found.append(DataLoader(data, batch_size=BATCH // replicas, sampler=sampler))
    return found


def trained(
    rank: int,
    grid: tuple[int, ...] | None,
    replicas: int = 1,
    recompute: bool = False,
    in_parts: bool = False,
    clip: float | None = None,
    path: Path | None = None,
    accelerator: str = "cpu",
    backend: str = "gloo",
) -> dict[str, Any]:
    torch.manual_seed(3)
    net = Net(recompute=recompute).double()
    if replicas > 1:  # their batch norms and masks are those of half minibatches
        net.down[1].norm, net.down[1].dropout = nn.GroupNorm(2, 6).double(), nn.Identity()
    ranks = 1 if grid is None else replicas * torch.Size(grid).numel()
    strategy: Any = "auto"
    if grid is not None:
        strategy = SpatialStrategy(grid=grid, replicas=replicas, process_group_backend=backend)
    trainer = pl.Trainer(
        **{**QUIET, **_places(rank, ranks, accelerator)},
        max_steps=STEPS,
        strategy=strategy,
        use_distributed_sampler=False,
        gradient_clip_val=clip,
    )
    parts = 1 if grid is None else ranks // replicas
    train, evaluation = loaders(
        1 if grid is None else replicas, rank // parts, in_parts=in_parts and grid is not None
    )
    torch.manual_seed(4)
    trainer.fit(net, train, evaluation)
    if path is not None:
        trainer.save_checkpoint(path / "whole.ckpt")
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = torch.cat(trainer.predict(net, evaluation)).cpu()  # type: ignore[arg-type]
    return {
        "weights": {name: value.cpu() for name, value in net.cpu().state_dict().items()},
        "losses": net.losses,
        "metrics": values,
        "counts": None if net.counts is None else net.counts.cpu(),
        "predicted": predicted,
        "forwards": [
            name
            for name, each in net.named_modules()
            if isinstance(vars(each).get("forward"), _SpatialForward)
        ],
    }


def _places(rank: int, ranks: int, accelerator: str) -> dict[str, Any]:
    if accelerator == "cpu":
        return {"devices": ranks}
    return own_node(rank, ranks, accelerator=accelerator)


def gap(mine: Any, theirs: Any) -> float:
    largest = max(float(theirs.abs().max()), 1e-6)
    return float((mine - theirs).abs().max()) / largest


@pytest.mark.parametrize(
    ("grid", "replicas", "recompute", "in_parts", "clip"),
    [
        ((1, 2), 1, False, False, None),
        ((2, 2), 1, True, True, 0.1),
        ((1, 2), 2, False, True, 0.1),
        ((4, 1), 1, True, False, None),
    ],
)
def test_a_training_equals_one_process(
    grid: tuple[int, int], replicas: int, recompute: bool, in_parts: bool, clip: float | None
) -> None:
    # Where PyTorch recomputes, a batch norm of one process counts each minibatch twice.
    (expected,) = run_shared(trained, 1, None, replicas, False, in_parts, clip)
    ranks = replicas * grid[0] * grid[1]
    for found in run_shared(trained, ranks, grid, replicas, recompute, in_parts, clip):
        for name, value in found["weights"].items():
            if not name.startswith(("accuracy", "confusion")):
                assert gap(value.double(), expected["weights"][name].double()) <= BOUND, name
        if replicas == 1:
            assert found["losses"] == pytest.approx(expected["losses"], rel=BOUND)
            assert gap(found["predicted"], expected["predicted"]) <= BOUND
        assert torch.equal(found["counts"], expected["counts"])
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
        assert found["forwards"] == []


def test_a_plain_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run_shared(trained, 2, (1, 2), 1, False, False, None, tmp_path)
    content = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    net = Net().double()
    trainer = pl.Trainer(**QUIET, max_steps=STEPS + 2)
    train, evaluation = loaders(1, 0)
    trainer.fit(net, train, evaluation, ckpt_path=str(tmp_path / "whole.ckpt"))
    assert trainer.global_step == STEPS + 2
    assert content["state_dict"].keys() == copy.deepcopy(net).state_dict().keys()


class Attentive(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.MultiheadAttention(4, 2))


class PartCompiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down.compile()


class Functional(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(torch.fft.fftn(x).real)


class Permuted(Net):
    """Predicts with channels last, and what belongs to it."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Any:
        pixels = super().predict_step(batch, batch_idx).permute(0, 2, 3, 1)
        return {"prediction": pixels, "certain": pixels > 0, "index": batch["index"]}


def permuted(rank: int) -> Tensor:
    torch.manual_seed(3)
    strategy = SpatialStrategy(grid=(1, 2))
    trainer = pl.Trainer(**QUIET, devices=2, strategy=strategy, use_distributed_sampler=False)
    batches = trainer.predict(Permuted().double(), loaders(1, 0)[1])
    return torch.cat([batch["prediction"] for batch in batches])  # type: ignore[call-overload, union-attr]


def test_predictions_are_whole_wherever_their_cut_dimensions_are() -> None:
    torch.manual_seed(3)
    net = Net().double().eval()
    with torch.no_grad():
        expected = net(Images(shift=0.5).x)[0].permute(0, 2, 3, 1)
    for found in run_shared(permuted, 2):
        assert gap(found, expected) <= BOUND


def written(rank: int, path: Path, grid: tuple[int, ...], replicas: int) -> None:
    torch.manual_seed(3)
    strategy = SpatialStrategy(grid=grid, replicas=replicas, gather_predictions=False)
    trainer = pl.Trainer(
        **QUIET,
        devices=4,
        strategy=strategy,
        use_distributed_sampler=False,
        callbacks=[WriteShards(path, samples=SAMPLES)],
    )
    loader = loaders(replicas, rank * replicas // 4, in_parts=True)[1]
    trainer.predict(Permuted().double(), loader, return_predictions=False)


@pytest.mark.parametrize(("grid", "replicas"), [((2, 2), 1), ((1, 2), 2)])
def test_predictions_are_written_shard_by_shard(
    tmp_path: Path, grid: tuple[int, int], replicas: int
) -> None:
    run_shared(written, 4, tmp_path / "all.npy", grid, replicas)
    torch.manual_seed(3)
    net = Net().double().eval()
    with torch.no_grad():
        expected = net(Images(shift=0.5).x)[0].permute(0, 2, 3, 1)
    found = torch.from_numpy(np.load(tmp_path / "all.npy"))
    assert gap(found, expected) <= BOUND


class Whole(Images):
    """Images whose borders are empty, as those of scans are, and nothing else that differs."""

    def __init__(self, *, in_parts: bool = False) -> None:
        super().__init__(in_parts=in_parts)
        self.x[:, :, :3], self.pixels[:] = 0, 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        return {"input": found["input"], "pixels": found["pixels"]}


class Unnamed(Whole):
    """The same, read in parts."""

    def __init__(self) -> None:
        super().__init__(in_parts=True)


def refused(
    rank: int, kind: type[Net], grid: tuple[int, ...], readers: int, options: dict[str, Any]
) -> str:
    data, net = options.pop("data", None), kind().double()
    model: Any = torch.compile(net) if options.pop("compiled", False) else net
    trainer = pl.Trainer(
        **QUIET,
        max_steps=1,
        devices=2,
        strategy=SpatialStrategy(grid=grid),
        use_distributed_sampler=False,
        **options,
    )
    loader = loaders(readers, rank % readers)[0]
    if data is not None:
        sampler = DistributedSampler(data, readers, rank % readers, shuffle=False)
        loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(model, loader)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "grid", "readers", "options", "text"),
    [
        (Attentive, (1, 2), 1, {}, r"attention.0 \(MultiheadAttention\)"),
        (Functional, (1, 2), 1, {}, "fftn has no rule"),
        (Net, (1, 2), 1, {"compiled": True}, "Net is compiled as a whole"),
        (PartCompiled, (1, 2), 1, {}, r"down \(Sequential\) is compiled"),
        (Net, (2, 2), 1, {}, "a grid of 2 x 2 and 1 replicas of it do not fit 2 ranks"),
        (Net, (1, 1, 2), 1, {}, "no tensor with 3 dimensions behind batch and channel"),
        (Net, (1, 2), 1, {"sync_batchnorm": True}, "sync_batchnorm=true does not go"),
        # As Lightning's own sampler would deal them: each rank reads other samples.
        (Net, (1, 2), 2, {}, "have read unlike batches"),
        (Net, (1, 2), 2, {"data": Whole()}, "have read unlike batches"),
        (Net, (1, 2), 1, {"data": Unnamed()}, "has nothing that tells which they are"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    kind: type[Net], grid: tuple[int, ...], readers: int, options: dict[str, Any], text: str
) -> None:
    for message in run(refused, 2, kind, grid, readers, options):
        assert re.search(text, message), message


def test_grids_are_checked_before_ranks_start() -> None:
    check_grid((1, 2), replicas=2, ranks=4)
    check_grid("auto", replicas=2, ranks=4)
    for grid, replicas, ranks in (((1, 2), 1, 4), ("auto", 3, 4), ((1,), 2, 2), ((2,), 0, 2)):
        with pytest.raises(ConfigError, match=r"ranks|one rank"):
            check_grid(grid, replicas=replicas, ranks=ranks)  # type: ignore[arg-type]


def test_the_best_grid_exchanges_least() -> None:
    assert best_grid((64, 64), 4) == (2, 2)
    assert best_grid((64, 64), 2) == (1, 2)
    assert best_grid((512, 8192), 4) == (1, 4)
    assert best_grid((96, 96, 96), 8) == (2, 2, 2)
    assert best_grid((3, 3), 9) == (3, 3)
    with pytest.raises(ConfigError, match="cannot be cut"):
        best_grid((2, 2), 5)
