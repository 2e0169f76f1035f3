"""Habits of hooks: of the module, of callbacks, of parameters and of layers."""

from __future__ import annotations

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import grad_norm
from torch import Tensor, nn

from tests.integration.habits.habit import Base, Habit, calling, hook
from tests.integration.habits.in_steps import Distilled


class ParameterHooked(Base):
    """Each gradient is clipped by itself, as in torch's recipes."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


class Masked(Base):
    """A pruned weight stays 0: its gradient is masked after it has been accumulated."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.layers[0].weight
        self.mask = torch.ones_like(weight)
        self.mask[::2] = 0
        weight.data *= self.mask
        weight.register_post_accumulate_grad_hook(self._mask)

    def _mask(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(self.mask)


class LayerHooked(Base):
    """Hooks of an entry change its output, and the gradients that come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda layer, inputs, out: out * 0.5)
        self.layers[4].register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 0.1,))
        self.layers[2].register_full_backward_hook(lambda layer, ins, outs: (ins[0] * 2,))


class BackwardHooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers.register_full_backward_hook(lambda layer, ins, outs: None)


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        weight_norm = torch.nn.utils.parametrizations.weight_norm
        for number in (0, 2):
            self.layers[number] = weight_norm(self.layers[number])


class MaxNorm(nn.Linear):
    """Keeps its weight's rows short, in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.5))
        return super().forward(x)


class MaxNormed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = MaxNorm(6, 8).double()


class FrozenNorm(Base):
    """Batch norm in evaluation mode, by a ``train`` of its own; its parameters frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(8).double())
        self.layers[1].requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class BatchNormed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(8).double())


class Frozen(Base):
    """Transfer learning: the first layer does not learn, and the optimizer has the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01)


class Thawing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)


def _penalised(self: Base, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.sign(), alpha=1e-3)


class MomentumTeacher(Distilled):
    """As BYOL and DINO have one; its layers are alike, so that wrong pairs raise no error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        pairs = zip(self.teacher.parameters(), self.layers.parameters(), strict=False)
        with torch.no_grad():
            for slow, quick in pairs:
                slow.lerp_(quick, 0.1)


class Ema(pl.Callback):
    """An average of the weights, as everybody writes one."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        now = [p.detach().clone() for p in pl_module.parameters()]
        before = self.average or now
        self.average = [0.9 * a + 0.1 * b for a, b in zip(before, now, strict=True)]


def _norms(self: Base, optimizer: Any) -> None:
    norms = grad_norm(self.layers, norm_type=2)
    self.total = norms["grad_2.0_norm_total"]


def _clamp_data(trainer: Any, module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def _gathered(self: Base, outputs: Any, batch: Any, batch_idx: int) -> None:
    world = self.trainer.world_size
    gathered = self.all_gather(torch.tensor(float(batch_idx)))
    self.numbers = gathered.reshape(-1).tolist() == [float(batch_idx)] * world


_STAGE_ONLY = "goes through the parameters of"

HOOKS = [
    Habit(
        written="`parameter.register_hook`, to clip, mask or scale each gradient",
        verdict="refused",
        note="in `on_before_optimizer_step`",
        module=ParameterHooked,
        message="has a hook for its gradient",
    ),
    Habit(
        written="`register_post_accumulate_grad_hook` that masks a gradient",
        verdict="refused",
        note="the same",
        module=Masked,
        message="has a hook for its gradient",
    ),
    Habit(
        written="forward hooks, pre-hooks and full backward hooks of an entry",
        verdict="same",
        module=LayerHooked,
    ),
    Habit(
        written="a full backward hook of the `Sequential` itself",
        verdict="refused",
        note="register it on an entry",
        module=BackwardHooked,
        message="layers has a backward hook",
    ),
    Habit(written="`weight_norm` (parametrizations)", verdict="same", module=Normed),
    Habit(
        written="a layer that changes its own weight in its forward (max norm)",
        verdict="refused",
        note="a parametrization, or `on_before_optimizer_step`",
        module=MaxNormed,
        message="layers.0.weight was changed by a layer's forward",
        early=False,
        synchronous=False,
    ),
    Habit(
        written="batch norm",
        verdict="same",
        note="with replicas and microbatches: see above",
        module=BatchNormed,
        strategy={"cuts": [3]},
        synchronous=False,
    ),
    Habit(
        written="`train()` overridden to keep batch norms in evaluation mode",
        verdict="same",
        module=FrozenNorm,
        strategy={"cuts": [3]},
    ),
    Habit(
        written="frozen layers (`requires_grad_(False)` in `__init__`)",
        verdict="same",
        module=Frozen,
    ),
    Habit(
        written="thawing them there",
        verdict="refused",
        note="`lr=0` until they are to learn, or two runs",
        module=Thawing,
        message="layers.0.weight was frozen when the run began",
        early=False,
    ),
    Habit(
        written="gradients changed in `on_before_optimizer_step`",
        verdict="same",
        module=hook("on_before_optimizer_step", _penalised),
    ),
    Habit(
        written="`grad_norm(self.layers)` in `on_before_optimizer_step`",
        verdict="different",
        note="of each rank's own stage, which rank 0 warns of",
        module=hook("on_before_optimizer_step", _norms),
        seen=lambda trainer, module: module.total,
        differs=lambda plain, ranks: abs(plain - (ranks[0] ** 2 + ranks[1] ** 2) ** 0.5) < 1e-9,
        warns=_STAGE_ONLY,
        synchronous=False,
    ),
    Habit(
        written="an EMA of the weights in a callback of one's own",
        verdict="different",
        note="of each rank's own stage, which rank 0 warns of: average checkpoints",
        trainer=lambda: {"callbacks": [Ema()]},
        seen=lambda trainer, module: next(
            callback.average for callback in trainer.callbacks if isinstance(callback, Ema)
        ),
        differs=lambda plain, ranks: (
            len(plain) == 6
            and all(map(torch.equal, ranks[0], plain[:2]))
            and all(map(torch.equal, ranks[1], plain[2:]))
        ),
        warns=_STAGE_ONLY,
        synchronous=False,
    ),
    Habit(
        written="a momentum teacher (BYOL, DINO), `AveragedModel.update_parameters`",
        verdict="different",
        note="a whole copy is paired with each rank's own stage, and so another loss is trained, "
        "which rank 0 warns of: `parallel=dp`",
        module=MomentumTeacher,
        strategy={"send_input": True},
        seen=lambda trainer, module: [p.clone() for p in module.teacher.parameters()],
        differs=lambda plain, ranks: (
            not any(all(map(torch.equal, plain, teacher)) for teacher in ranks)
        ),
        warns=_STAGE_ONLY,
        synchronous=False,
    ),
    Habit(
        written="`p.data.clamp_()` after a batch (WGAN), while minibatches are in flight",
        verdict="refused",
        note="in `on_before_optimizer_step`, or where the pipeline is empty",
        trainer=lambda: {"callbacks": [calling("on_train_batch_end", _clamp_data)]},
        message="was changed between two updates",
        drained=False,
        early=False,
    ),
    Habit(
        written="`p.data.clamp_()` in `on_train_epoch_end`",
        verdict="same",
        trainer=lambda: {"callbacks": [calling("on_train_epoch_end", _clamp_data)]},
    ),
    Habit(
        written="`self.all_gather` in `on_train_batch_end`",
        verdict="same",
        module=hook("on_train_batch_end", _gathered),
        seen=lambda trainer, module: module.numbers,
    ),
    Habit(
        written="`return -1` from `on_train_batch_start`, to end an epoch",
        verdict="same",
        module=hook("on_train_batch_start", lambda self, batch, i: -1 if i == 2 else None),
    ),
    Habit(
        written="`self.trainer.should_stop = True` in a hook",
        verdict="different",
        note="all ranks stop some steps later",
        module=hook(
            "on_train_batch_end",
            lambda self, *_: setattr(self.trainer, "should_stop", self.global_step >= 2),
        ),
        trainer=lambda: {"max_epochs": 20},
        drained=False,
        seen=lambda trainer, module: trainer.global_step,
        differs=lambda plain, ranks: plain < ranks[0] == ranks[1] < 40,
        synchronous=False,
    ),
]
