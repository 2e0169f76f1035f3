"""What Lightning's Trainer can do, on shards of each sample as in one process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning import callbacks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from sparsepipe.strategies import SpatialStrategy
from tests.support.pipeline_cases import QUIET
from tests.support.processes import run_shared
from tests.unit.strategies.test_spatial import Images

SAMPLES, BATCH, EPOCHS = 12, 2, 2
BOUND = 1e-10


class Net(pl.LightningModule):
    """Classes of images and of their pixels, with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5, padding=2, bias=False),  # whose gradient would be mere rounding
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Conv2d(6, 6, 3, padding=1, groups=2),
            nn.ReLU(),
        )
        self.pixels = nn.Conv2d(6, 4, 1)
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(6, 4)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        features = self.features(batch["input"])
        return (
            F.cross_entropy(self.pixels(features), batch["pixels"]),
            F.cross_entropy(self.head(self.pooled(features)), batch["label"]),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = sum(self.losses(batch))
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", sum(self.losses(batch)))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test", sum(self.losses(batch)), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        pixels: Tensor = self.pixels(self.features(batch["input"]))
        return pixels

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


class Scheduled(Net):
    """With a learning rate that changes in each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * 6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


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
            loss = self.losses(batch)[number] + sum(self.losses(batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train", loss)

    def configure_optimizers(self) -> Any:
        heads = [*self.pixels.parameters(), *self.head.parameters()]
        return [
            torch.optim.SGD(heads, lr=0.05),
            torch.optim.Adam(self.features.parameters(), lr=0.01),
        ]


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

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type=math.inf)


class Partly(Net):
    """Of which every second step leaves out a layer."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.losses(batch)[batch_idx % 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained.

    Args:
        module: class of the module.
        settings: makes arguments of the Trainer.
        strategy: more arguments of the strategy.
        precision: of the Trainer. In half precision shards differ from one process by no more than
            twice what that process differs from itself in single precision.
    """

    module: type[Net] = Net
    settings: Callable[[], dict[str, Any]] = dict
    strategy: dict[str, Any] | None = None
    precision: str = "64-true"


class Frozen(callbacks.BaseFinetuning):
    """Lets the first layer learn from the second epoch on."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.features[0])  # type: ignore[index, arg-type]

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.features[0], optimizer, lr=0.01)


def calling(make: Callable[[], pl.Callback], **settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make()], **settings}


LATE_AVERAGING = partial(
    callbacks.StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1
)
ACCUMULATING = partial(callbacks.GradientAccumulationScheduler, {0: 2, 1: 3})
STOPPING = partial(callbacks.EarlyStopping, "val", patience=1, min_delta=10.0)
CASES = {
    "plain": Case(),
    "bf16-mixed": Case(precision="bf16-mixed"),
    "bf16-true": Case(precision="bf16-true"),
    "16-mixed": Case(precision="16-mixed"),
    "clipping by norm": Case(settings=lambda: {"gradient_clip_val": 0.05}),
    "clipping by value": Case(
        settings=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "own clipping": Case(module=OwnClipping),
    "clipping in bf16-mixed": Case(
        precision="bf16-mixed", settings=lambda: {"gradient_clip_val": 0.05}
    ),
    "accumulation": Case(settings=lambda: {"accumulate_grad_batches": 4}),
    "accumulation by epochs": Case(settings=calling(ACCUMULATING)),
    "schedule": Case(module=Scheduled),
    "schedule by validation": Case(module=OnPlateau),
    "two optimizers by hand": Case(module=ByHand, strategy={"find_unused_parameters": True}),
    "lbfgs": Case(module=Lbfgs),
    "averaged weights": Case(settings=calling(partial(callbacks.EMAWeightAveraging, decay=0.9))),
    "averaged weights at the end": Case(settings=calling(LATE_AVERAGING, max_epochs=4)),
    "frozen at first": Case(settings=calling(Frozen), strategy={"find_unused_parameters": True}),
    "parts of the network": Case(module=Partly, strategy={"find_unused_parameters": True}),
    "early stopping": Case(settings=calling(STOPPING, max_epochs=9, val_check_interval=2)),
    "anomalies": Case(settings=lambda: {"detect_anomaly": True}),
    "deterministic": Case(settings=lambda: {"deterministic": True}),
    "overfitting": Case(settings=lambda: {"overfit_batches": 2}),
}


def images(dtype: torch.dtype = torch.float64) -> Subset[dict[str, Any]]:
    data = Images()
    data.x = data.x.to(dtype)
    return Subset(data, range(SAMPLES))


def trained(rank: int, name: str, ranks: int, precision: Any) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(3)
    net = case.module().double()
    if precision != "64-true":
        net.float()
    strategy: Any = "auto"
    if ranks > 1:
        strategy = SpatialStrategy(grid=(1, ranks), timeout_s=60.0, **(case.strategy or {}))
    settings = case.settings()
    trainer = pl.Trainer(
        **{**QUIET, "max_epochs": EPOCHS, "use_distributed_sampler": False, **settings},
        devices=ranks,
        strategy=strategy,
        precision=precision,
    )
    dtype = torch.float64 if precision == "64-true" else torch.float32
    loader = DataLoader(images(dtype), batch_size=BATCH)
    torch.manual_seed(4)
    try:
        trainer.fit(net, loader, loader)
    finally:
        torch.use_deterministic_algorithms(False)
    fitted = {key: float(value) for key, value in trainer.callback_metrics.items()}
    steps, rates = trainer.global_step, [o.param_groups[0]["lr"] for o in trainer.optimizers]
    (tested,) = trainer.test(net, loader, verbose=False)
    predicted: Any = trainer.predict(net, loader)
    return {
        "weights": {key: value.double() for key, value in net.state_dict().items()},
        "metrics": {**fitted, **tested},
        "steps": (steps, trainer.current_epoch),
        "rates": rates,
        "predicted": torch.cat(predicted).double(),
    }


def gaps(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Relative differences of weights, buffers, predictions, and what is logged."""
    assert mine["weights"].keys() == theirs["weights"].keys()
    assert mine["metrics"].keys() == theirs["metrics"].keys()
    pairs = {name: (mine["weights"][name], each) for name, each in theirs["weights"].items()}
    pairs["predicted"] = mine["predicted"], theirs["predicted"]
    found = {
        name: float((a - b).abs().max()) / max(float(b.abs().max()), 1e-2)
        for name, (a, b) in pairs.items()
    }
    logged = theirs["metrics"].items()
    return found | {name: abs(mine["metrics"][name] - b) / max(abs(b), 1e-2) for name, b in logged}


QUICK = ("bf16-mixed", "clipping by norm", "clipping by value", "accumulation", "averaged weights",
         "schedule by validation", "two optimizers by hand", "frozen at first")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)
def test_a_trainer_does_the_same_as_in_one_process(name: str) -> None:
    precision = CASES[name].precision
    (expected,) = run_shared(trained, 1, name, 1, precision)
    bounds = dict.fromkeys(gaps(expected, expected), BOUND)
    if precision != "64-true":
        (exact,) = run_shared(trained, 1, name, 1, "32-true")
        bounds = dict.fromkeys(bounds, 2 * max(gaps(expected, exact).values()))
    # Lightning keeps what is logged in single precision.
    bounds.update({each: max(bounds[each], 1e-6) for each in expected["metrics"]})
    for found in run_shared(trained, 2, name, 2, precision):
        assert found["steps"] == expected["steps"]
        assert found["rates"] == pytest.approx(expected["rates"])
        wrong = {k: (v, bounds[k]) for k, v in gaps(found, expected).items() if not v <= bounds[k]}
        assert wrong == {}


def resources() -> tuple[int, int, int]:
    """Process groups, threads and open files of this process."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, *(len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))


def fitted_often(rank: int, times: int, replicas: int) -> list[tuple[int, int, int]]:
    found = [resources()]
    for _ in range(times):
        net = Net().double()
        ranks = dist.get_world_size() // replicas
        strategy = SpatialStrategy(grid=(1, ranks), replicas=replicas, timeout_s=60.0)
        trainer = pl.Trainer(
            **QUIET,
            max_steps=1,
            devices=ranks * replicas,
            strategy=strategy,
            use_distributed_sampler=False,
        )
        data = images()
        sampler = DistributedSampler(data, replicas, rank // ranks)
        loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
        trainer.fit(net, loader)
        trainer.validate(net, loader, verbose=False)
        found.append(resources())
    return found


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_nothing_is_left_of_a_trainer(ranks: int, replicas: int) -> None:
    for first, second, *others in run_shared(fitted_often, ranks, 5, replicas):
        assert second[0] == first[0], "groups"
        assert {each[0] for each in others} == {first[0]}, "groups"
        # The first one starts threads for good, as that which computes backward passes.
        assert max(each[1] for each in others) <= second[1], "threads"
        assert max(each[2] for each in others) <= second[2], "open files"
