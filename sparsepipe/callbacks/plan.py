"""The plan of a pipeline, kept for the processes that go on with its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.config.outputs import writing
from sparsepipe.config.recomputation import with_spans
from sparsepipe.partition.activation_checkpointing.setting import bounds_of
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.strategies import StagedStrategy
from sparsepipe.utils.files import write_text_atomic

_TOLD = ("strategy", "bottleneck_s", "bottleneck", "dp_s", "stage_times_s", "transfer_times_s")


class KeepPlan(pl.Callback):
    """Writes the plan into the run's directory as training begins, as a plan file.

    Loggers get it as hyperparameters, with what its search expected of it, if it had one.

    Args:
        directory: the run's.
        devices: names of the ranks' devices.
        details: what else is known of the plan, where it was given in a file.

    A plan file tells the spans of layers that are recomputed as ``recomputed``, if there are some.
    """

    def __init__(
        self, directory: RunDir, devices: Sequence[str], details: Mapping[str, Any]
    ) -> None:
        self._directory = directory
        self._devices = devices
        self._details = details

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, path = trainer.strategy, self._directory.plan
        if not isinstance(strategy, StagedStrategy) or not trainer.is_global_zero:
            return
        if not path.exists():
            with writing(path):
                plan = with_spans(self._on_devices(strategy.plan), strategy.recomputed)
                write_text_atomic(path, plan.to_json())
        kept = Plan.from_json(path.read_text(encoding="utf-8"))
        told = {name: kept.details[name] for name in _TOLD if name in kept.details}
        if spans := bounds_of(strategy.recomputed):
            told["recomputed"] = spans
        hyperparameters = {"config": kept.config, "cuts": list(kept.cuts), **told}
        for logger in trainer.loggers:
            logger.log_hyperparams({"plan": hyperparameters})

    def _on_devices(self, plan: Plan) -> Plan:
        """As the strategy has it, with the devices on which the ranks are."""
        names = iter(self._devices)
        return replace(
            plan,
            details=self._details,
            stages=tuple(
                replace(stage, devices=tuple(islice(names, stage.replicas)))
                for stage in plan.stages
            ),
        )
