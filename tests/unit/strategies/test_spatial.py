"""Spatial parallelism in Lightning: on shards of each sample a Trainer does as in one process."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning import callbacks
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
SAMPLES, BATCH, EPOCHS = 12, 2, 2
BOUND = 1e-10


class Images(Dataset[dict[str, Any]]):
    """Random images with classes; ``named``: samples tell which they are."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, *, in_parts: bool = False, named: bool = True
    ) -> None:
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 3, *SIZES, generator=draw, dtype=torch.float64).to(dtype)
        self.pixels = torch.randint(4, (SAMPLES, *SIZES), generator=draw)
        self.label = torch.randint(4, (SAMPLES,), generator=draw)
        self.named = named
        self._part: tuple[slice, ...] = (slice(None), slice(None))
        if not named:  # whose borders are empty, as those of scans are
            self.x[:, :, :3], self.pixels[:] = 0, 0
        if in_parts:
            self.sample_sizes = SIZES
            self.read_part = self._read_part

    def _read_part(self, slices: tuple[slice, ...]) -> None:
        self._part = slices

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.x[index][(slice(None), *self._part)]
        found = {"input": x, "pixels": self.pixels[index][self._part]}
        if not self.named:
            return found
        return {**found, "label": self.label[index], "index": torch.tensor(index)}


def loader_of(data: Images, *, replicas: int = 1, replica: int = 0) -> DataLoader[Any]:
    """Minibatches of all replicas together are the same."""
    sampler = DistributedSampler(data, replicas, replica, shuffle=False)
    return DataLoader(data, batch_size=BATCH // replicas, sampler=sampler)


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        # Without a bias, whose gradient would be mere rounding.
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(channels)
        self.dropout: nn.Module = nn.Dropout(0.2)
        self.recompute = False

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.relu(self.norm(self.convolution(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            result: Tensor = checkpoint(self._compute, x, use_reentrant=False)
            return result
        return self._compute(x)


class Net(pl.LightningModule):
    """Somebody's own network: a small U-Net with a class for each pixel and one for the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 5, padding=2)
        self.down = nn.Sequential(nn.MaxPool2d(2), Block(6))
        self.up = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.last = nn.Conv2d(12, 4, 1)
        self.head = nn.Linear(6, 4)
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.confusion = MulticlassConfusionMatrix(4)
        self.counts: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        high = F.relu(self.first(x))
        low = self.down(high)
        return self.last(torch.cat([high, self.up(low)], 1)), self.head(low.mean((2, 3)))

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        pixels, logits = self(batch["input"])
        of_pixels = F.cross_entropy(pixels, batch["pixels"])
        return of_pixels, F.cross_entropy(logits, batch["label"]), logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = sum(self.losses(batch)[:2])
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        *losses, logits = self.losses(batch)
        self.accuracy(logits, batch["label"])
        self.confusion.update(logits, batch["label"])
        self.log("val", sum(losses), sync_dist=True)
        self.log("samples", float(len(logits)), reduce_fx="sum", sync_dist=True, batch_size=1)
        self.log("accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        self.counts = self.confusion.compute()
        self.confusion.reset()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test", sum(self.losses(batch)[:2]), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Any:
        return self(batch["input"])[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


class OnPlateau(Net):
    """With a learning rate that depends on what is validated."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=10.0, threshold_mode="abs"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class ByHand(Net):
    """With two optimizers, whose losses go backward one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            losses = self.losses(batch)[:2]
            loss = losses[number] + sum(losses)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train", loss)

    def configure_optimizers(self) -> Any:
        heads = [*self.last.parameters(), *self.head.parameters()]
        others = [p for part in (self.first, self.down, self.up) for p in part.parameters()]
        return [torch.optim.SGD(heads, lr=0.05), torch.optim.Adam(others, lr=0.01)]


class Lbfgs(Net):
    """Whose optimizer calls the training step several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnClipping(Net):
    """Which clips gradients in a way of its own, and changes them before a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def configure_gradient_clipping(self, *_: Any, **options: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type=math.inf)


class Partly(Net):
    """Of which every second step leaves out a layer."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.losses(batch)[batch_idx % 2]


class Frozen(callbacks.BaseFinetuning):
    """Lets the first layer learn in the second epoch only."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, lr=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Returns what is trained by a Trainer and a strategy with more settings."""

    module: type[Net] = Net
    settings: Callable[[], dict[str, Any]] = dict
    strategy: dict[str, Any] = field(default_factory=dict)
    precision: Any = "64-true"
    grid: tuple[int, ...] = (1, 2)
    replicas: int = 1
    recompute: bool = False
    in_parts: bool = False
    quick: bool = False


UNUSED = {"find_unused_parameters": True}
BY_NORM: dict[str, Any] = {"gradient_clip_val": 0.05}


def calling(make: Callable[[], pl.Callback], **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make()], **more}


CASES = {
    "plain": Case(),
    "four shards": Case(
        grid=(2, 2), recompute=True, in_parts=True, settings=lambda: BY_NORM, quick=True
    ),
    "thin shards": Case(grid=(4, 1), recompute=True),
    "replicas": Case(replicas=2, in_parts=True, settings=lambda: BY_NORM, quick=True),
    "one shard": Case(grid=(1, 1)),  # on a GPU, over NCCL
    "bf16-mixed": Case(precision="bf16-mixed", quick=True),
    "bf16-true": Case(precision="bf16-true"),
    "16-mixed": Case(precision="16-mixed"),
    "recomputed": Case(recompute=True, in_parts=True, settings=lambda: BY_NORM),
    "clipping by value": Case(
        settings=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, quick=True
    ),
    "own clipping": Case(module=OwnClipping),
    "accumulation": Case(settings=lambda: {"accumulate_grad_batches": 4}, quick=True),
    "schedule by validation": Case(module=OnPlateau, quick=True),
    "two optimizers by hand": Case(module=ByHand, strategy=UNUSED, quick=True),
    "lbfgs": Case(module=Lbfgs),
    "averaged weights": Case(settings=calling(lambda: callbacks.EMAWeightAveraging(decay=0.9))),
    "averaged weights at the end": Case(
        settings=calling(
            lambda: callbacks.StochasticWeightAveraging(
                swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1
            ),
            max_epochs=4,
        )
    ),
    "frozen at first": Case(settings=calling(Frozen), strategy=UNUSED, quick=True),
    "parts of the network": Case(module=Partly, strategy=UNUSED),
    "early stopping": Case(
        settings=calling(
            lambda: callbacks.EarlyStopping("val", patience=1, min_delta=10.0),
            max_epochs=9,
            val_check_interval=2,
        )
    ),
    "anomalies": Case(settings=lambda: {"detect_anomaly": True}),
}


def trainer_of(strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{**QUIET, "devices": 2, "use_distributed_sampler": False, "strategy": strategy, **options}
    )


def trained(
    rank: int,
    name: str,
    ranks: int,
    precision: Any = "64-true",
    path: Path | None = None,
    accelerator: str = "cpu",
    backend: str = "gloo",
) -> dict[str, Any]:
    """What comes of a case, on one of the ranks or in one process."""
    case, alone = CASES[name], ranks == 0
    torch.manual_seed(3)
    net = case.module().double()
    if precision != "64-true":
        net.float()
    block: Any = net.down[1]
    # Where PyTorch recomputes, a batch norm of one process counts each minibatch twice.
    block.recompute = case.recompute and not alone
    if case.replicas > 1:  # whose batch norms and masks are those of half minibatches
        block.norm, block.dropout = nn.GroupNorm(2, 6).double(), nn.Identity()
    replicas = 1 if alone else case.replicas
    strategy: Any = "auto"
    if not alone:
        strategy = SpatialStrategy(
            grid=case.grid,
            replicas=replicas,
            timeout_s=60.0,
            process_group_backend=backend,
            **case.strategy,
        )
    places = {"devices": ranks or 1}
    if accelerator != "cpu":
        places = own_node(rank, ranks or 1, accelerator=accelerator)
    options = {"max_epochs": EPOCHS, "precision": precision, **case.settings()}
    trainer = trainer_of(strategy, **options, **places)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    data = Images(dtype, in_parts=case.in_parts and not alone)
    loader = loader_of(data, replicas=replicas, replica=rank * replicas // (ranks or 1))
    torch.manual_seed(4)
    trainer.fit(net, loader, loader)
    if path is not None:
        trainer.save_checkpoint(path)
    fitted = {key: float(value) for key, value in trainer.callback_metrics.items()}
    steps, rates = trainer.global_step, [o.param_groups[0]["lr"] for o in trainer.optimizers]
    counts = None if net.counts is None else net.counts.cpu()
    (tested,) = trainer.test(net, loader, verbose=False)
    predicted: Any = trainer.predict(net, loader)
    state = {key: value.cpu().double() for key, value in net.state_dict().items()}
    return {
        "weights": {k: v for k, v in state.items() if not k.startswith(("accuracy", "confusion"))},
        "metrics": {**fitted, **tested},
        "steps": (steps, trainer.current_epoch),
        "rates": rates,
        "counts": counts,
        "predicted": torch.cat(predicted).cpu().double(),
        "forwards": [
            part
            for part, each in net.named_modules()
            if isinstance(vars(each).get("forward"), _SpatialForward)
        ],
    }


def gap(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-2)


def gaps(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Relative differences of weights, buffers, predictions, and what is logged."""
    assert mine["weights"].keys() == theirs["weights"].keys()
    assert mine["metrics"].keys() == theirs["metrics"].keys()
    found = {name: gap(mine["weights"][name], each) for name, each in theirs["weights"].items()}
    if mine["predicted"].shape == theirs["predicted"].shape:  # not of a replica's share
        found["predicted"] = gap(mine["predicted"], theirs["predicted"])
    logged = theirs["metrics"].items()
    return found | {name: abs(mine["metrics"][name] - b) / max(abs(b), 1e-2) for name, b in logged}


def check(name: str, everyone: list[Any], *, alone: Callable[[Any], Any]) -> None:
    """What ranks found against one process, which ``alone`` runs in a precision."""
    precision = CASES[name].precision
    expected = alone(precision)
    bounds = dict.fromkeys(gaps(expected, expected), BOUND)
    if precision != "64-true":
        bounds = dict.fromkeys(bounds, 2 * max(gaps(expected, alone("32-true")).values()))
    # Lightning keeps what is logged in single precision.
    bounds.update({each: max(bounds[each], 1e-6) for each in expected["metrics"]})
    for found in everyone:
        assert found["steps"] == expected["steps"]
        assert found["rates"] == pytest.approx(expected["rates"])
        wrong = {k: (v, bounds[k]) for k, v in gaps(found, expected).items() if not v <= bounds[k]}
        assert wrong == {}
        assert precision != "64-true" or torch.equal(found["counts"], expected["counts"])
        assert found["forwards"] == []


@pytest.mark.parametrize(
    "name",
    [
        name if case.quick else pytest.param(name, marks=pytest.mark.full)
        for name, case in CASES.items()
        if math.prod(case.grid) > 1
    ],
)
def test_a_trainer_does_the_same_as_in_one_process(name: str) -> None:
    case = CASES[name]
    ranks = case.replicas * math.prod(case.grid)
    everyone = run_shared(trained, ranks, name, ranks, case.precision)
    check(name, everyone, alone=lambda precision: run_shared(trained, 1, name, 0, precision)[0])


def test_a_plain_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run_shared(trained, 2, "plain", 2, "64-true", tmp_path / "whole.ckpt")
    net, trainer = Net().double(), pl.Trainer(**QUIET, max_epochs=EPOCHS + 1)
    loader = loader_of(Images())
    trainer.fit(net, loader, loader, ckpt_path=str(tmp_path / "whole.ckpt"))
    assert trainer.current_epoch == EPOCHS + 1


class Permuted(Net):
    """Predicts with channels last, and what belongs to it."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Any:
        pixels = super().predict_step(batch, batch_idx).permute(0, 2, 3, 1)
        return {"prediction": pixels, "certain": pixels > 0, "index": batch["index"]}


def permuted(rank: int) -> Tensor:
    torch.manual_seed(3)
    batches = trainer_of(SpatialStrategy(grid=(1, 2))).predict(
        Permuted().double(), loader_of(Images())
    )
    return torch.cat([batch["prediction"] for batch in batches])  # type: ignore[call-overload, union-attr]


def written(rank: int, path: Path, grid: tuple[int, ...], replicas: int) -> None:
    torch.manual_seed(3)
    strategy = SpatialStrategy(grid=grid, replicas=replicas, gather_predictions=False)
    trainer = trainer_of(strategy, devices=4, callbacks=[WriteShards(path, samples=SAMPLES)])
    loader = loader_of(Images(in_parts=True), replicas=replicas, replica=rank * replicas // 4)
    trainer.predict(Permuted().double(), loader, return_predictions=False)


def predicted_alone() -> Tensor:
    torch.manual_seed(3)
    net = Net().double().eval()
    with torch.no_grad():
        found: Tensor = net(Images().x)[0].permute(0, 2, 3, 1)
    return found


def test_predictions_are_whole_wherever_their_cut_dimensions_are() -> None:
    for found in run_shared(permuted, 2):
        assert gap(found, predicted_alone()) <= BOUND


@pytest.mark.parametrize(("grid", "replicas"), [((2, 2), 1), ((1, 2), 2)])
def test_predictions_are_written_shard_by_shard(
    tmp_path: Path, grid: tuple[int, int], replicas: int
) -> None:
    run_shared(written, 4, tmp_path / "all.npy", grid, replicas)
    assert gap(torch.from_numpy(np.load(tmp_path / "all.npy")), predicted_alone()) <= BOUND


def resources() -> tuple[int, int, int]:
    """Process groups, threads and open files of this process."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, *(len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))


def fitted_often(rank: int, times: int, replicas: int) -> list[tuple[int, int, int]]:
    found = [resources()]
    for _ in range(times):
        net, ranks = Net().double(), dist.get_world_size() // replicas
        strategy = SpatialStrategy(grid=(1, ranks), replicas=replicas, timeout_s=60.0)
        trainer = trainer_of(strategy, max_steps=1, devices=ranks * replicas)
        loader = loader_of(Images(), replicas=replicas, replica=rank // ranks)
        trainer.fit(net, loader)
        trainer.validate(net, loader, verbose=False)
        found.append(resources())
    return found


@pytest.mark.parametrize(
    ("ranks", "replicas"), [pytest.param(2, 1, marks=pytest.mark.full), (4, 2)]
)
def test_nothing_is_left_of_a_trainer(ranks: int, replicas: int) -> None:
    for first, second, *others in run_shared(fitted_often, ranks, 5, replicas):
        assert second[0] == first[0], "groups"
        assert {each[0] for each in others} == {first[0]}, "groups"
        # The first one starts threads for good, as that which computes backward passes.
        assert max(each[1] for each in others) <= second[1], "threads"
        assert max(each[2] for each in others) <= second[2], "open files"


class Attentive(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.MultiheadAttention(4, 2))


class Functional(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(torch.fft.fftn(x).real)


def compiled_part() -> Net:
    net = Net().double()
    net.down.compile()
    return net


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    r"attention.0 \(MultiheadAttention\)": (Attentive, {}),
    "fftn has no rule": (Functional, {}),
    "a grid of 2 x 2 with replicas=1 does not fit the number of ranks, 2": (Net, {"grid": (2, 2)}),
    "no tensor with 3 dimensions after batch and channel": (Net, {"grid": (1, 1, 2)}),
    "sync_batchnorm=true cannot be combined with samples": (Net, {"sync_batchnorm": True}),
    # As Lightning's own sampler would deal them: each rank reads other samples.
    "have read different batches": (Net, {"readers": 2}),
    "have read different batches, whose": (Net, {"readers": 2, "data": {"named": False}}),
    "does not tell which samples it has": (Net, {"data": {"named": False, "in_parts": True}}),
    "Net is compiled as a whole": (lambda: torch.compile(Net().double()), {}),
    r"down \(Sequential\) is compiled": (compiled_part, {}),
}


def refused(rank: int, text: str) -> str:
    make, given = REFUSED[text]
    options = dict(given)
    data, readers = Images(**options.pop("data", {})), options.pop("readers", 1)
    strategy = SpatialStrategy(grid=options.pop("grid", (1, 2)), timeout_s=60.0)
    trainer = trainer_of(strategy, max_steps=1, **options)
    sampler = DistributedSampler(data, readers, rank % readers, shuffle=False)
    model = make()
    with pytest.raises(ConfigError) as caught:
        trainer.fit(
            model.double() if isinstance(model, Net) else model,
            DataLoader(data, batch_size=BATCH, sampler=sampler),
        )
    return str(caught.value)


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_cut_is_refused(text: str) -> None:
    for message in run(refused, 2, text):
        assert re.search(text.partition(", whose")[0], message), message
        assert "remedy: " in message


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
    with pytest.raises(ConfigError, match="no grid cuts"):
        best_grid((2, 2), 5)
