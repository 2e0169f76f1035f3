"""What people write in a LightningModule: in two stages it does as in one process, or is refused.

Rows of the table in ``docs/pipeline.md`` that no other test has. The asynchronous pipeline runs
empty after each step, so that its weights are never old and equality is to the bit; synchronous
ones cut the batch in two, and are the same but for rounding.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from sparsepipe.strategies.pipeline import RemoteBatch
from tests.support.habit_cases import (
    ACROSS_STAGES,
    CLASSES,
    Base,
    Habit,
    calling,
    hooked,
    loader,
    options,
    step,
)
from tests.support.pipeline_cases import QUIET
from tests.support.processes import outcomes, run_shared

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


class Headed(Base):
    """A head after the layers, a buffer of weights and a counter, and hooks that it counts."""

    def prepare(self) -> None:
        self.head = nn.Linear(CLASSES, CLASSES).double()
        self.register_buffer("share", torch.linspace(1, 2, CLASSES).double())
        self.register_buffer("seen", torch.zeros(()))
        self.hooks = [0, 0, 0]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self.head(self.layers(batch[0]))
        self.seen += len(batch[1])
        loss = F.cross_entropy(logits, batch[1], weight=self.share, reduction="none").mean()
        return {"loss": loss, "extra": logits.sum()}

    def on_after_backward(self) -> None:
        self.hooks[0] += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks[1] += 1

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, RemoteBatch)
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert "loss" in outputs
        self.hooks[2] += 1


class Logging(Base):
    """Logs in hooks for batches, of which most ranks have none."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("number", float(batch_idx), on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("square", float(batch_idx**2), on_step=True, on_epoch=True)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("val_number", float(batch_idx + 1))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_square", torch.tensor(float(batch_idx**2 + 2)))


def _combined(self: Base, batch: Any, batch_idx: int) -> Tensor:
    (x, y), (other, _) = batch["a"], batch["b"]
    return self.loss(x + 0.1 * other, y)


def _grouped(self: Base) -> Any:
    decayed = [p for n, p in self.named_parameters() if n.endswith("weight")]
    others = [p for n, p in self.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.001}]
    return torch.optim.AdamW(groups, lr=0.01)


def _on_plateau(self: Base) -> Any:
    optimizer = Base.configure_optimizers(self)
    schedule = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def _clip_by_stage(self: Base, *_: Any, **given: Any) -> None:
    """In one process what two stages do."""
    for stage in (self.layers[:2], self.layers[2:]):
        nn.utils.clip_grad_norm_(stage.parameters(), given["gradient_clip_val"])


def _is_clipped_by_stage(plain: Tensor, ranks: list[Tensor]) -> bool:
    module = hooked(configure_gradient_clipping=_clip_by_stage)
    one = trained(Habit(module=module, trainer=options(gradient_clip_val=0.05)), "plain")
    return not torch.equal(plain, ranks[0]) and torch.equal(
        one["weights"]["layers.0.weight"], ranks[0]
    )


def _best_score(trainer: Any, module: Any) -> tuple[int, float]:
    assert trainer.current_epoch < 9
    return trainer.current_epoch, float(trainer.checkpoint_callback.best_model_score)


def _autoencoder(self: Base, x: Tensor, y: Tensor) -> Tensor:
    return (self.layers(x) - x[:, :CLASSES]).square().mean()


def _logs(self: Base, x: Tensor, y: Tensor) -> Tensor:
    logits = self.layers(x)
    loss = F.cross_entropy(logits, y)
    self.log_dict({"a": loss, "b": logits.mean()}, on_step=True, on_epoch=True, prog_bar=True)
    self.log("most", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
    self.log("shared", loss, sync_dist=True, batch_size=len(x))
    return loss


def _on_the_device(self: Base, x: Tensor, y: Tensor) -> Tensor:
    first = next(self.parameters())
    assert sum(p.numel() for p in self.parameters() if p.requires_grad) == 164
    assert first.dtype == torch.float64
    return self.loss(x, y.to(first.device))


def _penalty(self: Base, x: Tensor, y: Tensor) -> Tensor:
    return self.loss(x, y) + 1e-3 * torch.stack([p.abs().sum() for p in self.parameters()]).sum()


def _change_layers(self: Base) -> None:
    self.layers[1].register_forward_hook(lambda layer, inputs, out: out * 0.5)
    self.layers[4].register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 0.1,))
    self.layers[2].register_full_backward_hook(lambda layer, ins, outs: (ins[0] * 2,))


def _watch_all(self: Base) -> None:
    self.layers.register_full_backward_hook(lambda layer, ins, outs: None)


def _freeze(self: Base) -> None:
    self.layers[0].requires_grad_(False)


def _thaw(self: Base) -> None:
    if self.current_epoch == 1:
        self.layers[0].requires_grad_(True)


def _penalised(self: Base, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.sign(), alpha=1e-3)


def _average(trainer: Any, module: Any) -> None:
    now = [p.detach().clone() for p in module.parameters()]
    before = getattr(trainer, "average", now)
    trainer.average = [0.9 * a + 0.1 * b for a, b in zip(before, now, strict=True)]


def _clamp(trainer: Any, module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def _gather(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    gathered = self.all_gather(torch.tensor(float(batch_idx))).reshape(-1).tolist()
    self.numbers = gathered == [float(batch_idx)] * self.trainer.world_size


def _one_cycle(self: Base) -> Any:
    optimizer = Base.configure_optimizers(self)
    total = int(self.trainer.estimated_stepping_batches)
    schedule = schedulers.OneCycleLR(optimizer, 0.5, total_steps=total)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _halving(self: Base) -> Any:
    optimizer = Base.configure_optimizers(self)
    return [optimizer], [schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def _two_optimizers(self: Base) -> Any:
    halves = self.layers[:2].parameters(), self.layers[2:].parameters()
    return [torch.optim.SGD(half, lr=0.1) for half in halves], []


def _warm_up(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    """From the documentation of ``optimizer_step``."""
    optimizer.step(closure=optimizer_closure)
    for group in optimizer.param_groups:
        group["lr"] = min(1.0, float(self.trainer.global_step + 1) / 5.0) * 0.1


def _skip(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    if batch_idx % 2 == 0:
        optimizer.step(closure=optimizer_closure)
    else:
        optimizer_closure()


def _twice(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    optimizer.step(closure=optimizer_closure)
    optimizer.step(closure=optimizer_closure)


class ConfiguredModel(Base):
    def prepare(self) -> None:
        self.made = [self.layers]  # no child
        self.layers = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        self.layers = self.layers or self.made[0]


class Loading(Base):
    """Loaders of its own, made anew for each epoch."""

    def train_dataloader(self) -> Any:
        return loader(seed=self.current_epoch)

    def val_dataloader(self) -> Any:
        return loader(seed=4)


HABITS = {
    **ACROSS_STAGES,
    "`self.log`, `self.log_dict` with `on_step`, `on_epoch`, `reduce_fx`, `sync_dist`": Habit(
        module=step(_logs),
        synchronous=False,  # which merge what microbatches log by a mean
    ),
    "a head after the layers, buffers, counters in buffers": Habit(
        module=Headed, seen=lambda trainer, module: module.hooks, synchronous=False
    ),
    "the same with `send_input=True`": Habit(
        module=step(_autoencoder), strategy={"send_input": True}
    ),
    "one layer called by itself (`self.layers[0]`)": Habit(
        module=step(lambda self, x, y: self.loss(x, y) + self.layers[0](x).mean()),
        strategy={"send_input": True},
        message="layer layers.0 was called by itself",
        early=False,
    ),
    "a penalty over `self.parameters()` in a step (L1, L2, EWC)": Habit(
        module=step(_penalty),
        message="a step uses layers.0.weight, which is on another rank",
        early=False,
    ),
    "`next(self.parameters()).device`, `sum(p.numel() for p in self.parameters())`": Habit(
        module=step(_on_the_device)
    ),
    "`self.all_gather` in a step": Habit(
        module=step(lambda self, x, y: self.all_gather(self.loss(x, y)).mean()),
        message="a step calls all_gather",
        early=False,
    ),
    "`self.trainer.strategy.barrier()` in a step": Habit(
        module=step(lambda self, x, y: (self.trainer.strategy.barrier(), self.loss(x, y))[1]),
        message="a step calls barrier",
        early=False,
    ),
    "forward hooks, pre-hooks and full backward hooks of an entry": Habit(
        module=hooked(prepare=_change_layers)
    ),
    "a full backward hook of the `Sequential` itself": Habit(
        module=hooked(prepare=_watch_all), message="layers has a backward hook"
    ),
    "thawing them there": Habit(
        module=hooked(prepare=_freeze, on_train_epoch_start=_thaw),
        message="layers.0.weight was frozen when the run began",
        early=False,
    ),
    "gradients changed in `on_before_optimizer_step`": Habit(
        module=hooked(on_before_optimizer_step=_penalised)
    ),
    "an EMA of the weights in a callback of one's own": Habit(
        trainer=calling("on_train_batch_end", _average),
        seen=lambda trainer, module: trainer.average,
        differs=lambda plain, ranks: (
            len(plain) == 6 and all(map(torch.equal, ranks[0] + ranks[1], plain))
        ),
        warns="goes through the parameters of",
        synchronous=False,
    ),
    "`p.data.clamp_()` after a batch (WGAN), while minibatches are in flight": Habit(
        trainer=calling("on_train_batch_end", _clamp),
        message="was changed between two updates",
        drained=False,
        early=False,
    ),
    "`self.all_gather` in `on_train_batch_end`": Habit(
        module=hooked(on_train_batch_end=_gather), seen=lambda trainer, module: module.numbers
    ),
    "`self.log` in hooks for batches": Habit(module=Logging),
    "`return -1` from `on_train_batch_start`, to end an epoch": Habit(
        module=hooked(on_train_batch_start=lambda self, batch, i: -1 if i == 2 else None)
    ),
    "one optimizer, parameter groups with options of their own": Habit(
        module=hooked(configure_optimizers=_grouped)
    ),
    "`ReduceLROnPlateau` on `val_loss`, each epoch": Habit(
        module=hooked(configure_optimizers=_on_plateau)
    ),
    '`OneCycleLR` with `interval="step"`, `self.trainer.estimated_stepping_batches`': Habit(
        module=hooked(configure_optimizers=_one_cycle)
    ),
    "`lr_scheduler_step` of one's own (timm)": Habit(
        module=hooked(
            configure_optimizers=_halving,
            lr_scheduler_step=lambda self, scheduler, _: scheduler.step(epoch=self.current_epoch),
        )
    ),
    "several optimizers (GANs)": Habit(
        module=hooked(configure_optimizers=_two_optimizers), message="multiple optimizers"
    ),
    "`optimizer_step` with a warm-up of the rate": Habit(module=hooked(optimizer_step=_warm_up)),
    "`optimizer_step` that skips updates (`else: optimizer_closure()`)": Habit(
        module=hooked(optimizer_step=_skip),
        message="optimizer_step calls optimizer_closure without",
        early=False,
    ),
    "two updates of one batch": Habit(
        module=hooked(optimizer_step=_twice),
        message="makes two updates with one batch",
        early=False,
    ),
    '`gradient_clip_algorithm="value"`': Habit(
        trainer=options(gradient_clip_val=0.01, gradient_clip_algorithm="value")
    ),
    "`gradient_clip_val` (by norm)": Habit(
        trainer=options(gradient_clip_val=0.05),
        seen=lambda trainer, module: module.layers[0].weight.detach().clone(),
        differs=_is_clipped_by_stage,
    ),
    '`precision="bf16-mixed"`': Habit(
        trainer=options(precision="bf16-mixed"),
        module=lambda: Base().float(),
        fit=lambda trainer, module: trainer.fit(
            module, *(loader(seed=seed, dtype=torch.float32) for seed in (3, 4))
        ),
        synchronous=False,  # but for more rounding
    ),
    "`overfit_batches`, with a loader that shuffles": Habit(
        trainer=options(overfit_batches=2),
        fit=lambda trainer, module: trainer.fit(module, loader(shuffle=True), loader()),
    ),
    "a dictionary of loaders, `CombinedLoader`": Habit(
        module=hooked(training_step=_combined),
        fit=lambda trainer, module: trainer.fit(
            module, CombinedLoader({"a": loader(), "b": loader(seed=9)}, "max_size_cycle"), loader()
        ),
    ),
    "`EarlyStopping` on `val_loss`": Habit(
        trainer=lambda: {
            "max_epochs": 9,
            "enable_checkpointing": True,
            "callbacks": [
                EarlyStopping("val_loss", patience=2, min_delta=0.05),
                ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss"),
            ],
        },
        seen=_best_score,
    ),
    "the network made in `configure_model`": Habit(module=ConfiguredModel),
    "`train_dataloader` of the module, `reload_dataloaders_every_n_epochs=1`": Habit(
        module=Loading,
        trainer=lambda: {"reload_dataloaders_every_n_epochs": 1},
        fit=lambda trainer, module: trainer.fit(module),
    ),
}


def trained(habit: Habit, kind: str) -> dict[str, Any]:
    """Runs a habit in this process; its weights, logged values, and what it has seen."""
    torch.manual_seed(1)
    module = habit.module()
    given: dict[str, Any] = {**QUIET, "devices": 1, "max_epochs": 2, "num_sanity_val_steps": 0}
    if habit.drained:
        given |= {"val_check_interval": 1, "limit_val_batches": 1}
    plan = {"config": "1-1", "cuts": [2], "timeout_s": 30, **habit.strategy}
    if kind == "asynchronous":
        given |= {"devices": 2, "strategy": PipelineStrategy(**plan)}
    elif kind == "synchronous":
        given |= {"devices": 2, "strategy": SynchronousPipelineStrategy(microbatches=2, **plan)}
    trainer = pl.Trainer(**{**given, **habit.trainer()})
    torch.manual_seed(2)
    if habit.fit is None:
        trainer.fit(module, loader(), loader(seed=4))
    else:
        habit.fit(trainer, module)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "seen": habit.seen(trainer, module),
    }


def on_a_rank(rank: int, name: str, kind: str) -> Any:
    """A training's outcome, what was warned of, and how many steps optimizers made."""
    steps: list[Any] = []
    counting = register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(optimizer))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome: Any = trained(HABITS[name], kind)
        except (ConfigError, MisconfigurationException, RuntimeError) as error:
            outcome = error
        finally:
            counting.remove()
    return outcome, [str(warning.message) for warning in caught], len(steps)


@functools.cache
def plainly(name: str) -> dict[str, Any]:
    """In this process, on one thread as ranks are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trained(HABITS[name], "plain")
    torch.set_num_threads(before)
    return found


def named(*, refused: bool, early: bool = True, synchronous: bool = False) -> list[str]:
    return [
        name
        for name, habit in HABITS.items()
        if (bool(habit.message), habit.early) == (refused, early)
        and (habit.synchronous or not synchronous)
    ]


@pytest.mark.parametrize("name", named(refused=False))
def test_asynchronous_pipelines_do_as_the_page_says(name: str) -> None:
    habit, plain = HABITS[name], plainly(name)
    ranks = run_shared(on_a_rank, 2, name, "asynchronous")
    if habit.differs is not None:
        assert habit.differs(plain["seen"], [outcome["seen"] for outcome, _, _ in ranks])
        told = [sum(bool(habit.warns) and habit.warns in t for t in texts) for _, texts, _ in ranks]
        assert told == [int(bool(habit.warns)), 0]
        return
    for outcome, texts, steps in ranks:
        assert steps
        assert not any("zero_grad goes through" in text for text in texts)
        torch.testing.assert_close(outcome, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", named(refused=False, synchronous=True))
def test_synchronous_pipelines_do_as_one_device(name: str) -> None:
    plain = plainly(name)
    for outcome, _, _ in run_shared(on_a_rank, 2, name, "synchronous"):
        for part, rounding in (("weights", 1e-12), ("seen", 1e-12), ("logged", 1e-5), ("steps", 0)):
            torch.testing.assert_close(outcome[part], plain[part], rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", named(refused=True))
def test_refused_before_the_first_step(name: str) -> None:
    for error, _, steps in run_shared(on_a_rank, 2, name, "asynchronous"):
        assert not steps
        assert HABITS[name].message in str(error)
        assert isinstance(error, RuntimeError) or error.remedy


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if kind == "asynchronous" else [pytest.mark.full])
        for name in named(refused=True, early=False)
        for kind in ("asynchronous", "synchronous")
        if kind == "asynchronous" or HABITS[name].drained
    ],
)
def test_refused_when_it_happens(name: str, kind: str) -> None:
    """One rank sees it, or all do; the run ends on all of them, before an update counts."""
    ends = outcomes(on_a_rank_of_its_own, 2, name, kind, limit_s=60)
    assert all(end.error is not None for end in ends)
    errors = [end.error for end in ends if isinstance(end.error, ConfigError)]
    assert errors
    for error in errors:
        assert HABITS[name].message in error.message
        assert error.remedy


def on_a_rank_of_its_own(rank: int, name: str, kind: str) -> None:
    trained(HABITS[name], kind)


def test_the_page_has_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, habit in HABITS.items():
        verdict = "refused" if habit.message else "different" if habit.differs else "same"
        assert f"| {name} | {verdict} |" in page
