"""How fast an emulated training went, from when its steps ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.errors import ConfigError
from sparsepipe.schedule.asynchronous import steady_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Minibatches in the cluster's own time.

    Args:
        steady_per_s: minibatches a second in the second half of the epoch, before it drains.
        steady_steps: how many steps that is.
        epoch_per_s: of the whole epoch, in which a pipeline fills and drains.
        epoch_s: the epoch's time.
        minibatches: of the epoch.
    """

    steady_per_s: float
    steady_steps: int
    epoch_per_s: float
    epoch_s: float
    minibatches: int


def rates(
    ends_s: Sequence[float], *, begin_s: float, per_step: int, time_scale: float, ahead: int
) -> Rates:
    """The rates of an epoch.

    Args:
        ends_s: when each step ended, the last one after the drain.
        begin_s: when the first one began.
        per_step: minibatches of a step, one for each replica of the first stage.
        time_scale: how many times slower than the cluster all went.
        ahead: steps that the first stage is ahead of its own backward passes, which go on as
            fast as that stage alone can.

    Raises:
        ConfigError: there are too few steps for a steady part.
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
    """The steps after whose ends the steady part of an epoch begins and ends.

    Args:
        steps: of the epoch.
        ahead: as of :func:`rates`.

    Raises:
        ConfigError: there are too few steps.
    """
    found = steady_rounds(steps, ahead=ahead)
    if found is None:
        least = max(5, ahead + 4)
        raise ConfigError(
            f"an emulated epoch of {steps} steps has no steady part: a pipeline fills in the "
            f"first {ahead + 1} of them and drains in the last",
            remedy=f"set trainer.limit_train_batches to {least} or more, better to {4 * least}, or "
            "task.minibatches to as many for each rank that reads",
        )
    return found
