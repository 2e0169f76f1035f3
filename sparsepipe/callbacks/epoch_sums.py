"""What an epoch has logged so far goes into the checkpoint of a stop within it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies.metrics import State, merged_states, put_state, state_of
from sparsepipe.strategies.trainer_internals import LoggedValue, drop_computed, training_values

log = logging.getLogger(__name__)

_KEY = "epoch_sums"
_HOOK = "training_step"

Sums = dict[str, State]
"""By Lightning's name of a logged value."""


class EpochSums(pl.Callback):
    """Lets ``train/loss``, ``train/accuracy`` and the like be those of the whole epoch.

    Lightning begins them anew when a run goes on within an epoch. A stop's checkpoint has each
    rank's sums of what ``training_step`` logs for an epoch, numbers and torchmetrics; the epoch's
    end adds those of the batches after the stop. So this comes before all callbacks that ask for
    metrics. Ranks of a pipeline hold everyone's sums, in the checkpoint as at the end. Of a metric
    that has no rule for merging, a warning says that it lacks the batches before the stop.
    """

    def __init__(self) -> None:
        self._before: Sums = {}
        self._ended = False

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        mine = {} if self._ended else dict(self._of_epoch(trainer))
        checkpoint[_KEY] = process_group.gather_objects(mine)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        everyone = checkpoint.get(_KEY, [])
        if len(everyone) == process_group.world_size():
            self._before = everyone[process_group.rank()]

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not called where an earlier process has begun the epoch.
        self._before, self._ended = {}, False

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logged = dict(_logged(trainer))
        for key, whole in self._of_epoch(trainer):
            if key in self._before:
                put_state(_summed(logged[key]), whole)
                drop_computed(logged[key])
        self._before, self._ended = {}, True

    def _of_epoch(self, trainer: pl.Trainer) -> Iterator[tuple[str, State]]:
        """Sums of this process's batches and of those before an earlier stop."""
        for key, item in _logged(trainer):
            mine, before = state_of(_summed(item)), self._before.get(key)
            whole = mine if before is None else _merged(item, [before, mine])
            if whole is None:
                log.warning(
                    "%s of this epoch lacks the batches before the stop: %s cannot be merged",
                    item.meta.name,
                    type(item.value).__name__,
                )
            yield key, mine if whole is None else whole


def _logged(trainer: pl.Trainer) -> Iterator[tuple[str, LoggedValue]]:
    """What steps log for an epoch; a metric once, also where it has two names."""
    seen: set[int] = set()
    for key, item in training_values(trainer).items():
        if item.meta.fx == _HOOK and item.meta.on_epoch and id(_summed(item)) not in seen:
            seen.add(id(_summed(item)))
            yield key, item


def _summed(item: LoggedValue) -> Any:
    """What has the states: Lightning's own sum of a number, or the module's metric."""
    return item if item.is_tensor else item.value


def _merged(item: LoggedValue, states: list[State]) -> State | None:
    if not item.is_tensor:
        return merged_states(item.value, states)
    whole = {name: sum(state[name] for state in states) for name in states[0]}
    if item.meta.is_max_reduction or item.meta.is_min_reduction:
        whole["value"] = item.meta.reduce_fx(*(state["value"] for state in states))
    return whole
