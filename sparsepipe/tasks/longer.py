"""Longer trainings: they go on where a finished run with fewer epochs of the same has ended."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import pytorch_lightning as pl

from sparsepipe.callbacks import Resume
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.runs.checkpoints import read_checkpoint
from sparsepipe.runs.metrics import read_rows
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import writing
from sparsepipe.utils.tables import write_csv

log = logging.getLogger(__name__)


def begin_with_shorter(spec: RunSpec, directory: RunDir) -> None:
    """Gives a run that has not begun the checkpoint of a shorter one, or says why not.

    The run then does what it would have done from the first epoch on: what epochs draw depends on
    their numbers alone.

    Args:
        spec: the configuration of the longer training.
        directory: its directory; ``shorter`` is that of the finished run.

    Raises:
        CheckpointError: the checkpoint is broken.
    """
    shorter = directory.shorter
    if shorter is None or spec.force or directory.last.exists():
        return
    if not shorter.last.exists():
        log.warning(
            "%s has trained fewer epochs of the same, and this training begins anew: its last "
            "checkpoint was not kept (trainer.checkpoints=last or both keeps it)",
            shorter.path,
        )
        return
    content, rows = read_checkpoint(shorter.last), read_rows(shorter.metrics)
    place = Resume.read(shorter.last, content)
    reason = _why_not(spec, content, ended_early=place.epoch < _epochs_of(shorter))
    if reason is None and (place.batches or place.epoch != len(rows)):
        reason = "its checkpoint is of the middle of an epoch"
    if reason is not None:
        log.warning(
            "%s has trained %d epochs of the same, and this training begins anew: %s; "
            "checkpoint=%s would take its weights",
            shorter.path,
            len(rows),
            reason,
            shorter.path,
        )
        return
    with writing(directory.path):
        directory.checkpoints.mkdir(parents=True, exist_ok=True)
        untested = [{k: v for k, v in row.items() if not k.startswith("test/")} for row in rows]
        write_csv(directory.metrics, untested)
        for source, target in ((shorter.plan, directory.plan), (shorter.best, directory.best)):
            if source.exists() and not target.exists():
                shutil.copyfile(source, target)
        partial = directory.last.with_name(f".{directory.last.name}.tmp")
        shutil.copyfile(shorter.last, partial)
        partial.replace(directory.last)  # last: with it the run has begun
    log.info("going on from %s, which has trained %d epochs of the same", shorter.path, len(rows))


def _epochs_of(shorter: RunDir) -> int:
    return RunSpec.load(shorter.config).trainer.max_epochs or 0


def _why_not(spec: RunSpec, content: dict[str, Any], *, ended_early: bool) -> str | None:
    """Why a longer training would have done something else in these epochs; None: it would not."""
    schedule, model = spec.optim.schedule, spec.model.locate()
    own = isinstance(model, type) and issubclass(model, pl.LightningModule)
    if ended_early:
        return "it ended before its last epoch, as a longer one would"
    for name, callback in spec.callbacks.items():
        if callback.name == "StochasticWeightAveraging":
            return f"callbacks.{name} begins at a share of all epochs"
    if content.get("lr_schedulers") and (own or schedule is None):
        return "the module's own learning-rate schedule may depend on the number of epochs"
    if not own and schedule is not None and schedule.get("horizon") is not None:
        return "the learning-rate schedule was spread over fewer epochs (optim.schedule.horizon)"
    return None
