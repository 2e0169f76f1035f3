"""A learning-rate schedule as a value: what builds it and what its clock counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsepipe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """Builds a ``torch`` scheduler once the length of the training is known.

    Args:
        factory: called as ``factory(optimizer)`` or ``factory(optimizer, **{horizon: n})``.
        interval: the schedule advances once per Lightning ``step`` or ``epoch``.
        horizon: name of the argument of ``factory`` that takes the schedule's length in
            units of ``interval`` (``total_steps`` of OneCycleLR, ``T_max`` of
            CosineAnnealingLR); None for schedules that need none.

    Raises:
        ConfigError: ``interval`` is neither ``step`` nor ``epoch``.
    """

    factory: Callable[..., LRScheduler]
    interval: Literal["step", "epoch"] = "step"
    horizon: str | None = None

    def __post_init__(self) -> None:
        if self.interval not in ("step", "epoch"):
            raise ConfigError(
                f"the schedule's interval is {self.interval!r}", remedy="use 'step' or 'epoch'"
            )

    def build(self, optimizer: Optimizer, *, steps: float, epochs: int) -> dict[str, Any]:
        """Lightning's scheduler entry for a training of ``steps`` steps in ``epochs`` epochs.

        Args:
            optimizer: whose learning rate it is.
            steps: infinite where nobody knows.
            epochs: negative where nobody knows.

        Raises:
            ConfigError: the length is needed and not known, or the factory refuses its
                arguments.
        """
        arguments = {} if self.horizon is None else {self.horizon: self._length(steps, epochs)}
        try:
            scheduler = self.factory(optimizer, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the learning-rate schedule refuses its settings: {error}",
                remedy="correct the keys of optim.schedule",
            ) from error
        return {"scheduler": scheduler, "interval": self.interval}

    def _length(self, steps: float, epochs: int) -> int:
        length = steps if self.interval == "step" else epochs
        if math.isinf(length) or length < 0:
            raise ConfigError(
                f"the learning-rate schedule needs the training's length in {self.interval}s, "
                "which has no end",
                remedy="set trainer.max_epochs to a number, or choose optim.schedule=null",
            )
        return int(length)
