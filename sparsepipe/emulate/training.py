"""Training on an emulated rank: replay layers, minibatches of zeros, and measured rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from sparsepipe.emulate.replay import ZEROS, ReplayLayer, ReplayPace, shape_of
from sparsepipe.errors import ConfigError, ProfileError
from sparsepipe.profiling import Profile
from sparsepipe.schedule.asynchronous import steady_rounds


class ReplayModule(pl.LightningModule):
    """A network with the times and sizes of a profile.

    Args:
        profile: the network's profile on this rank's device.
        pace: pauses in place of computing.
        momentum: momentum of SGD, for modes that predict weights with it; the time to
            compute such updates is part of ``update_s``.
        updates: whether updates take the profile's ``update_s``, if it has one.
        rows: rows of a minibatch that is cut into microbatches; None: it is not cut.
    """

    def __init__(
        self,
        profile: Profile,
        pace: ReplayPace,
        *,
        momentum: float = 0.0,
        updates: bool = True,
        rows: int | None = None,
    ) -> None:
        super().__init__()
        if not profile.parameter_bytes:
            raise ProfileError(
                "no layer of the profile has parameters, so nothing can be trained",
                remedy="give the layers their parameter_bytes, or measure the model with "
                "task=profile",
            )
        self._momentum = momentum
        self._pace = pace
        self._computing_since_s: float | None = None
        self._updates = updates and profile.update_s is not None
        layers = (ReplayLayer(layer, pace, rows=rows) for layer in profile.layers)
        self.layers = nn.Sequential(*layers)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output_n: Tensor = self.layers(batch["input"])
        return output_n.mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        made = torch.optim.SGD if self._momentum else UnmovedSGD
        optimizer = made(self.parameters(), lr=1e-3, momentum=self._momentum)
        # A pipeline's stage removes the parameters of other stages from the optimizer.
        update_s = {
            layer.weight_p: layer.profile.update_s or 0.0
            for layer in self.layers
            if isinstance(layer, ReplayLayer) and layer.weight_p is not None
        }

        def pause(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            seconds = sum(update_s[parameter] for parameter in held)
            self._pace.take(seconds, since_s=self._computing_since_s)

        if self._updates:
            optimizer.register_step_post_hook(pause)
        return optimizer

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Gradients exist by now: only the update is left of the step.
        if self._momentum:
            self._computing_since_s = self._pace.clock()


class UnmovedSGD(torch.optim.SGD):
    """SGD that computes nothing, since all gradients are zeros."""

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


class ReplayData(pl.LightningDataModule):
    """Yields ``minibatches`` minibatches of zeros, shaped by :func:`shape_of` like the input."""

    def __init__(self, profile: Profile, *, minibatches: int, rows: int | None = None) -> None:
        super().__init__()
        self._count, self._shape = minibatches, shape_of(profile.input_bytes, rows)

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        minibatches = [{"input": ZEROS.of(*self._shape)} for _ in range(self._count)]
        return DataLoader(minibatches, batch_size=None)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of an emulated epoch, as on the cluster: the time scale is divided out.

    Args:
        steady_per_s: minibatches a second in the second half of the epoch, before it drains.
        steady_steps: number of steps in that time.
        epoch_per_s: minibatches a second over the whole epoch, with its fill and drain.
        epoch_s: seconds of the epoch.
        minibatches: number of minibatches of the epoch.
    """

    steady_per_s: float
    steady_steps: int
    epoch_per_s: float
    epoch_s: float
    minibatches: int


def rates(
    ends_s: Sequence[float], *, begin_s: float, per_step: int, time_scale: float, ahead: int
) -> Rates:
    """Computes the rates of an epoch that began at ``begin_s`` and whose steps, of ``per_step``
    minibatches, ended at ``ends_s``: seconds, ``time_scale`` times those of the cluster. ``ahead``:
    steps whose forwards run before the first backward, as for :func:`steady_rounds`.
    """
    steps = len(ends_s)
    first, last = steady_part(steps, ahead=ahead)
    steady_s = (ends_s[last] - ends_s[first]) / time_scale
    epoch_s = (ends_s[-1] - begin_s) / time_scale
    return Rates(
        steady_per_s=per_step * (last - first) / steady_s,
        steady_steps=last - first,
        epoch_per_s=per_step * steps / epoch_s,
        epoch_s=epoch_s,
        minibatches=per_step * steps,
    )


def steady_part(steps: int, *, ahead: int) -> tuple[int, int]:
    """Indices of the steps between whose ends an epoch is steady; a ConfigError if none are."""
    found = steady_rounds(steps, ahead=ahead)
    if found is None:
        least = max(5, ahead + 4)
        raise ConfigError(
            f"an emulated epoch with steps={steps} is too short: a pipeline fills until step "
            f"{ahead + 1} and drains in the last one; only the second half is measured",
            remedy=f"set trainer.limit_train_batches to {least} or more, better to {4 * least}, or "
            "task.minibatches to as many for each rank that reads data",
        )
    return found
