"""The task ``train``: trains, validates, and tests once at the end."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
from lightning_fabric.utilities.exceptions import MisconfigurationException

from sparsepipe.callbacks import (
    FiniteOnly,
    Measured,
    MetricsCsv,
    ResumableLoaders,
    Resume,
    RunCheckpoint,
    StopOnSignal,
    Trace,
)
from sparsepipe.callbacks.metrics import epoch_metrics, mean_over_ranks
from sparsepipe.callbacks.stop import stop_if_requested
from sparsepipe.config.build import refuse_further_outputs
from sparsepipe.config.finished_run import CLASSES, recorded_settings
from sparsepipe.errors import CheckpointError, ConfigError, DataError, SparsePipeError
from sparsepipe.models import Classifier
from sparsepipe.partition.explanation import rank_times
from sparsepipe.runs.best import NONFINITE
from sparsepipe.runs.checkpoints import (
    find_checkpoint,
    first_weights,
    load_weights,
    read_checkpoint,
)
from sparsepipe.runs.metrics import add_to_last_row, read_rows
from sparsepipe.runs.randomness import seed_epoch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.synchronous_worker import is_of_single_values
from sparsepipe.schedule import Plan
from sparsepipe.simulate.trace import trace_text
from sparsepipe.tasks.evaluate import TestTimer, inference_rate
from sparsepipe.tasks.presentation import (
    StartLine,
    class_accuracies,
    draw_test,
    gather_cases,
    log_planned,
    log_test,
    num_shapes,
)
from sparsepipe.tasks.result import kept_values, peak_values, plan_values, versions, write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.tracking.loggers import WandbRunLogger
from sparsepipe.utils.files import read_mapping, write_csv, write_json, write_text_atomic, writing

log = logging.getLogger(__name__)

_FORWARDS: Mapping[str, Any] = {"warmup": 2, "timed": 20, "most_s": 20.0}
"""Arguments of :func:`inference_rate`: as many passes as in task=evaluate, but a limited time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Task):
    """Trains a model, from the run's last checkpoint if it has one.

    ``conf/task/train.yaml`` describes the settings.
    """

    test: bool = True
    monitor: str | None = None
    mode: Literal["max", "min"] = "max"
    test_weights: Literal["best", "last"] = "best"
    gallery: int = 24

    def run(self, run: ResolvedRun) -> None:
        """Trains, validates, and tests once at the end."""
        self.train(run)

    def train(
        self,
        run: ResolvedRun,
        *,
        forwards: Mapping[str, Any] = _FORWARDS,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Trains like :meth:`run`. ``forwards``: arguments of :func:`inference_rate`; ``more``:
        further values for ``result.json``.
        """
        spec, seed = run.spec, int(run.spec.seed)
        data = run.load_data("fit", *(["test"] if self.test else []))
        module = run.build_module(data)
        refuse_further_outputs(spec, data, module)
        facts: dict[str, Any] = first_weights(spec)
        facts["parameters"] = sum(p.numel() for p in module.parameters())  # before it is split
        resume = _place(run, module)
        fitted = _agreed(run, resume)
        loaders = ResumableLoaders(seed, resume=resume)
        record = {  # what makes a checkpoint usable without its run, as plain values
            CLASSES: [str(name) for name in getattr(data, "classes", ())],
            "config": recorded_settings(spec.to_dict()),
            "data": getattr(data, "recorded", dict)(),
            "versions": versions(),
        }
        checkpoint = RunCheckpoint(
            run.directory,
            monitor=self.monitor,
            mode=self.mode,
            resume=resume,
            record=record,
            loaders=loaders,
            finite=FiniteOnly(spec.trainer.nonfinite),
        )
        timer, start = TestTimer(), StartLine(run)
        trace = [Trace()] if spec.trainer.trace else []
        callbacks = [checkpoint.finite, timer, start, run.keep_plan(), loaders]
        callbacks += [MetricsCsv(run.directory.metrics), StopOnSignal(run.watch, checkpoint)]
        callbacks += [checkpoint, *trace]
        trainer = run.trainer(callbacks)
        start.test_shapes = _check_splits(run, trainer, data, test=self.test)
        for logger in trainer.loggers:
            if isinstance(logger, WandbRunLogger) and resume is not None:
                logger.resume(resume, read_rows(run.directory.metrics))
            logger.log_hyperparams(spec.to_dict())
        seed_epoch(seed, 0)
        if fitted:  # by an earlier process
            done = read_mapping(run.directory.fitted)
        else:
            done = _fit(run, trainer, module, data, checkpoint=checkpoint, resume=resume)
            if trace:
                _write_trace(run, trace[0].gathered())
        values = {**facts, **training_values(run), **done}
        if values.get("profiling_s") and values.get("train_time_s"):
            share = values["profiling_s"] / values["train_time_s"]
            values["profiling_share_of_training"] = share
        if self.test:
            values.update(self._tested(run, trainer, module, data, checkpoint))
            values.update(timer.values(), test_shapes=start.test_shapes)
        # Peaks of the whole run, earlier processes included, before batches are kept for timing.
        for name, size in peak_values().items():
            values[name] = max(size, values.get(f"train_{name}", 0))
        parallel = spec.parallel  # whose ranks may hold parts of the network or of samples
        apart = "plan_config" in values or (parallel.grid, parallel.roles) != (None, None)
        if self.test and isinstance(module, Classifier) and not apart:
            rate = inference_rate(trainer, module, data, **forwards)
            values["inference_shapes_per_s"] = sum(process_group.gather_objects(rate))
        write_result(run, {**values, **(more or {}), **class_accuracies(module)})
        if process_group.rank() == 0:  # last, when no other rank waits for this one any more
            self._show(run, module, data, values)

    def _tested(
        self,
        run: ResolvedRun,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        data: pl.LightningDataModule,
        checkpoint: RunCheckpoint,
    ) -> dict[str, Any]:
        """Tests the best weights if there are any, unless ``test_weights`` is ``last``."""
        best = run.directory.best
        weights = best if self.test_weights == "best" and best.exists() else None
        if process_group.rank() == 0:
            value = None if weights is None else checkpoint.best
            monitored = "" if value is None else f", {checkpoint.monitor}={value:.4g}"
            log.info("testing the weights of %s%s", weights or "the last epoch", monitored)
        path = None if weights is None else str(weights)
        trainer.test(module, datamodule=data, ckpt_path=path, verbose=False, weights_only=True)
        gather_cases(module)
        metrics = mean_over_ranks(epoch_metrics(trainer))
        if process_group.rank() == 0:
            tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
            add_to_last_row(run.directory.metrics, tested)
        return {**metrics, **({} if weights is None else {"tested_checkpoint": weights.name})}

    def _show(
        self,
        run: ResolvedRun,
        module: pl.LightningModule,
        data: pl.LightningDataModule,
        values: Mapping[str, Any],
    ) -> None:
        """Draws the run's pictures and logs its results."""
        from sparsepipe.plots import style  # imports matplotlib
        from sparsepipe.plots.curves import learning_curves_figure
        from sparsepipe.plots.pipeline import draw_schedule

        if self.test:
            draw_test(run, module, data, gallery=self.gallery)
        directory, synchronous = run.directory, run.spec.parallel.synchronous
        if directory.metrics.exists():
            picture = directory.path / "learning_curves.png"
            tested = "best" if "tested_checkpoint" in values else "last"
            try:
                style.save_png(learning_curves_figure(directory.metrics, tested=tested), picture)
            except DataError as error:
                log.info("no learning curves: %s", error.message)
        slowdowns = {place.text: place.slowdown for place in run.places}
        draw_schedule(directory, synchronous, slowdowns=slowdowns)
        try:
            log_planned(run, values)
        except SparsePipeError as error:  # a training that is done must not fail because of it
            log.warning("the plan's rate is not compared: %s", error.message)
        log_test(run, module, values)


def _check_splits(
    run: ResolvedRun, trainer: pl.Trainer, data: pl.LightningDataModule, *, test: bool
) -> int:
    """Makes loaders before training; returns the number of test shapes. Refuses a metric of a
    validation that does not exist.
    """
    data.trainer = trainer  # from which users' own loaders may take the number of ranks
    validation = _validation(data)
    watching = {"objective": run.spec.objective}
    for name, each in run.spec.callbacks.items():
        watching[f"callbacks.{name}.monitor"] = each.get("monitor")
    for key, metric in watching.items():
        if (validation is None or validation == []) and str(metric).startswith("val/"):
            raise ConfigError(
                f"{key} is {metric}, but there is no validation",
                remedy="set data.val_share to a share of the training samples, such as 0.1, or "
                f"{key} to a metric of the training, such as train/loss",
            )
    return num_shapes(data.test_dataloader()) if test else 0


def _validation(data: pl.LightningDataModule) -> Any:
    with suppress(MisconfigurationException):
        return data.val_dataloader()
    return None


def _fit(
    run: ResolvedRun,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    *,
    checkpoint: RunCheckpoint,
    resume: Resume | None,
) -> dict[str, Any]:
    """Trains, and returns values for ``result.json``."""
    path = None if resume is None else resume.path
    try:
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    except ValueError as error:
        if not is_of_single_values(error):
            raise
        raise ConfigError(
            f"a batch norm sees a single value of each channel, which has no variance ({error})",
            remedy="if the epoch's last batch has 1 sample, choose another data.batch_size, or "
            "leave that batch out with trainer.limit_train_batches",
        ) from error
    validation = trainer.val_dataloaders
    if validation is None and trainer.limit_val_batches:
        validation = _validation(data)  # an earlier process has trained all epochs
    done = {
        "steps": trainer.global_step,
        "best_monitored": checkpoint.best,
        "train_shapes": num_shapes(trainer.train_dataloader),
        "val_shapes": num_shapes(validation),
        **{f"train_{name}": size for name, size in peak_values().items()},
        **plan_values(run, trainer),
        **kept_values(run),
    }
    if found := checkpoint.finite.agreed():
        done[NONFINITE] = found
    if process_group.rank() == 0 and run.directory.last.exists():
        # If a callback ended the training early, a rerun would not otherwise know that it is over.
        write_json(run.directory.fitted, done)
    stop_if_requested(run.watch)
    return done


def _write_trace(run: ResolvedRun, found: Measured | None) -> None:
    """Writes ``trace.json`` and a picture; logs the times of ranks next to the expected ones."""
    from sparsepipe.plots.pipeline import draw_measured, rank_name

    if process_group.rank() > 0:
        return
    if found is None:
        log.warning(
            "no trace: it begins after two minibatches for each rank, but the training had no more"
        )
        return
    plan = Plan.load(run.directory.plan)
    text = trace_text(plan, found.spans, kind="measured")
    write_text_atomic(run.directory.path / "trace.json", text)
    draw_measured(run.directory, found.spans, run.spec.parallel.synchronous)
    synchronous, expected = run.spec.parallel.synchronous is not None, rank_times(plan)
    for rank in found.windows:
        stage = plan.stage_of(rank)
        batches = plan.replicas(0) / plan.replicas(stage) if synchronous else 1.0
        planned_s = {
            f"{name}s": seconds * (1.0 if name == "update" else batches)
            for name, seconds in (expected[rank] if expected else {}).items()
            if name != "device"
        }
        log.info("trace, %s: %s", rank_name(plan, rank), found.in_words(rank, planned_s))


def _place(run: ResolvedRun, module: pl.LightningModule) -> Resume | None:
    """Loads the weights to begin with; returns where the run resumes, or None for a new run."""
    last, first = run.directory.last, run.spec.checkpoint
    if last.exists():
        content = read_checkpoint(last)
        if lacking := [key for key in ("optimizer_states", "loops") if key not in content]:
            raise CheckpointError(
                f"{last} contains no training to continue: it has no {' and no '.join(lacking)}",
                remedy="remove it to begin the run anew",
            )
        load_weights(module, content["state_dict"], last)
        place = Resume.read(last, content)
        log.info("resuming at epoch %d, batch %d", place.epoch + 1, place.batches + 1)
        return place
    if first is not None:
        path = find_checkpoint(first, outputs=run.spec.paths.outputs)
        weights = read_checkpoint(path)["state_dict"]
        loaded = load_weights(module, weights, path, strict=run.spec.checkpoint_strict)
        if process_group.rank() == 0:
            log.info("initial weights from %s: %s", path, loaded)
            with writing(run.directory.first_weights):
                write_csv(run.directory.first_weights, loaded.table())
    return None


def _agreed(run: ResolvedRun, resume: Resume | None) -> bool:
    """Returns whether an earlier process trained to the end, on which all ranks must agree."""
    fitted = resume is not None and run.directory.fitted.exists()
    seen = (None if resume is None else (resume.epoch, resume.batches), fitted)
    everywhere = process_group.gather_objects(seen)
    differing = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
    if differing:
        raise ConfigError(
            f"ranks 0 and {differing[0]} find different checkpoints in {run.directory.checkpoints}",
            remedy="set paths.outputs to a directory that all nodes share",
        )
    return fitted


def training_values(run: ResolvedRun) -> dict[str, Any]:
    """Returns the number of epochs, their times (median, sum), median rate and last metrics."""
    rows = read_rows(run.directory.metrics)
    values: dict[str, Any] = {"epochs": len(rows)}
    if rows:
        last = {key: value for key, value in rows[-1].items() if "/" in key}
        values.update({key: float(value) if value else None for key, value in last.items()})
        times_s = [float(row["time/epoch_s"]) for row in rows if row.get("time/epoch_s")]
        if times_s:
            values["epoch_time_s"] = statistics.median(times_s)
            values["train_time_s"] = sum(times_s)
        rates = [float(r["train/shapes_per_s"]) for r in rows if r.get("train/shapes_per_s")]
        if rates:
            values["train_shapes_per_s"] = statistics.median(rates)
    return values
