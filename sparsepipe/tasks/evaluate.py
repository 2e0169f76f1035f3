"""The task ``evaluate``: the accuracy of a checkpoint, and the speed of inference."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from typing_extensions import override

from sparsepipe.callbacks.metrics import epoch_metrics, mean_over_ranks
from sparsepipe.callbacks.progress import batch_size_of
from sparsepipe.callbacks.resumable_loading import STATE_KEY, Resume
from sparsepipe.config.build import ready_data, refuse_further_outputs
from sparsepipe.config.finished_run import CLASSES, RECORD, differences
from sparsepipe.config.run_spec import RunSpec, is_below
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.planning.devices import are_there
from sparsepipe.planning.division import read_plan_file
from sparsepipe.profiling.activations import crossing_bytes, fresh
from sparsepipe.profiling.timing import Clock
from sparsepipe.runs.checkpoints import best_checkpoint, load_weights, read_checkpoint
from sparsepipe.runs.metrics import write_rows
from sparsepipe.runs.randomness import seed_epoch
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.tasks.presentation import (
    class_accuracies,
    draw_test,
    gather_cases,
    log_test,
    write_predictions,
)
from sparsepipe.tasks.result import peak_values, plan_values, write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import expanded, write_text_atomic, writing

log = logging.getLogger(__name__)

_PREPARED_BYTES = 2**28


class TestTimer(pl.Callback):
    """Times a test from its start to the end of its last batch, including the loading of data."""

    __test__ = False  # not for pytest

    def __init__(self) -> None:
        self.seconds = 0.0
        self.shapes = 0
        self._started = 0.0

    @override
    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    @override
    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.shapes += batch_size_of(batch)
        Clock(pl_module.device).synchronise()
        self.seconds = time.perf_counter() - self._started

    def values(self) -> dict[str, float]:
        """Returns the slowest rank's time and all ranks' shapes/s; every rank must call it."""
        parts = process_group.gather_objects((self.seconds, self.shapes))
        longest_s = max(seconds for seconds, _ in parts)
        shapes = sum(shapes for _, shapes in parts) / process_group.ranks_per_sample
        return {"test_time_s": longest_s, "test_shapes_per_s": shapes / max(longest_s, 1e-9)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Task):
    """Measures a checkpoint on the test split, and the speed of inference.

    Model, data and backend are those of the checkpoint's training unless the command sets others.

    ``conf/task/evaluate.yaml`` describes the settings.
    """

    as_trained: ClassVar[bool] = True
    not_identity: ClassVar[tuple[str, ...]] = ("task.allow",)

    allow: list[str] = field(default_factory=list)
    gallery: int = 24
    warmup_batches: int = 2
    timed_batches: int = 20

    @override
    def prepare(self, run: ResolvedRun) -> str:
        """Prepares the data; returns a fingerprint. Refuses settings that contradict training."""
        training, spec = run.training, run.spec
        found = [] if training is None else differences(spec.to_dict(), training)
        refused = [
            each for each in found if each.contradicts and not is_below(each.key, self.allow)
        ]
        if refused:
            keys = ", ".join(each.key for each in refused)
            raise ConfigError(
                f"the configuration contradicts the training of {spec.checkpoint}: "
                + "; ".join(map(str, refused)),
                remedy="leave these settings out of the command, which then takes those of the "
                f"training; or, if you mean them, set task.allow=[{keys}]",
            )
        try:
            return ready_data(spec)
        except DataError as error:
            root = None if training is None else training.values["data"].get("root")
            moved = root is not None and not expanded(root).exists()
            if training is None or not moved or spec.data.get("root") != root:
                raise
            raise DataError(
                f"{error.message}; data.root is that of {training.origin}",
                remedy="set data.root to the directory in which these data are now",
            ) from error

    def run(self, run: ResolvedRun) -> None:
        """Tests the checkpoint, then times forward passes if devices hold the whole network."""
        path, spec, training = self.checkpoint(run.spec), run.spec, run.training
        content = read_checkpoint(path)
        different: list[str] = []
        if training is not None:
            different = [str(each) for each in differences(spec.to_dict(), training)]
        elif (content.get(RECORD) or {}).get("config"):
            raise ConfigError(
                f"{spec.checkpoint} has values that cannot be read before your own modules are "
                "imported, so the model and data of its training are unknown",
                remedy="pass the path of the checkpoint inside its run's directory, whose "
                "config.yaml names the model and data",
            )
        data = run.load_data("test")
        self._check_classes(path, content, data)
        module = run.build_module(data)
        refuse_further_outputs(spec, data, module)
        load_weights(module, content["state_dict"], path)
        if process_group.rank() == 0:
            epoch = ""
            if STATE_KEY in (content.get("callbacks") or {}):  # a run has written it
                place = Resume.read(path, content)
                epoch = f", of epoch {place.epoch + bool(place.batches)}"
            log.info("evaluating %s%s", path, epoch)
            if training is None:
                log.warning("the training of %s is unknown: model and data are as configured", path)
            else:
                log.info("model, data and backend are those of %s", training.origin)
            for text in different:
                log.warning("but %s", text)
        timer = TestTimer()
        trainer = run.trainer([timer])
        seed_epoch(int(spec.seed), 0)
        trainer.test(module, datamodule=data, verbose=False)
        gather_cases(module)
        metrics = mean_over_ranks(epoch_metrics(trainer))
        values: dict[str, Any] = {**metrics, **timer.values()}
        values.update(peak_values())  # before batches are kept in memory to be timed
        split = plan_values(run, trainer)
        # Otherwise a device may not have room for the whole network, or for whole samples.
        if not split and (spec.parallel.grid, spec.parallel.roles) == (None, None):
            effort = {"warmup": self.warmup_batches, "timed": self.timed_batches}
            rate = inference_rate(trainer, module, data, **effort)
            values["inference_shapes_per_s"] = sum(process_group.gather_objects(rate))
        values["evaluated_checkpoint"] = path.name
        if different:
            values["differs_from_training"] = "; ".join(different)
        values.update(split)
        values.update(class_accuracies(module))
        if process_group.rank() == 0:
            write_rows(run.directory.metrics, [{"epoch": 0, "step": 0, **metrics}])
        write_result(run, values)
        if process_group.rank() == 0:
            write_predictions(run, module, data)
            draw_test(run, module, data, gallery=self.gallery)
            log_test(run, module, values)

    def checkpoint(self, spec: RunSpec) -> Path:
        """Returns the path of the checkpoint file to measure."""
        return best_checkpoint(spec, task="evaluate")

    def _check_classes(
        self, path: Path, content: Mapping[str, Any], data: pl.LightningDataModule
    ) -> None:
        then = [str(name) for name in (content.get(RECORD) or {}).get(CLASSES) or ()]
        now = [str(name) for name in getattr(data, "classes", ())]
        if then and now and then != now and not is_below(CLASSES, self.allow):
            order = "in another order than" if sorted(then) == sorted(now) else "not"
            both = zip_longest(then, now, fillvalue="none")
            was, found = next((a, b) for a, b in both if a != b)
            raise ConfigError(
                f"the classes of the data are {order} those that {path} was trained on: the first "
                f"that differs was {was!r} and is {found!r}",
                remedy="evaluate on data with the same classes in the same order; or, if you "
                f"mean it, set task.allow=[{CLASSES}]",
            )

    def adopt_plan(self, run: ResolvedRun) -> None:
        """Copies the training's plan to the run's directory, in place of a search, if the
        checkpoint belongs to a run with a plan for the same devices.
        """
        if run.spec.search is None or run.directory.plan.exists():
            return
        plan = RunDir(self.checkpoint(run.spec).parent.parent).plan
        if not plan.exists():
            return
        division = read_plan_file(plan)
        if not are_there(division, run.inventory) or division.num_ranks != run.ranks:
            log.info("the plan of the training, %s, is for other devices", plan)
            return
        log.info("using the plan of the training: %s", plan)
        with writing(run.directory.path):
            write_text_atomic(run.directory.plan, plan.read_text(encoding="utf-8"))


@torch.inference_mode()
def inference_rate(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    *,
    warmup: int,
    timed: int,
    most_s: float = math.inf,
) -> float:
    """Returns this rank's shapes/s over ``timed`` forward passes on test batches, after ``warmup``
    untimed ones; it stops after ``most_s`` seconds. Kernel maps are included, loading is not.
    """
    read, held_bytes = [], 0  # the first batches, used in turn; fewer if they are large
    for batch in islice(iter(data.test_dataloader()), warmup + timed):
        read.append(batch)
        held_bytes += crossing_bytes(batch)
        if held_bytes > _PREPARED_BYTES:
            break
    if not read or not timed:
        return 0.0
    module.eval()
    device = module.to(trainer.strategy.root_device).device
    slowdown = getattr(trainer.strategy, "slowdown", Slowdown())
    clock, shapes, elapsed_s = Clock(device), 0, 0.0
    for number in range(warmup + timed):
        # One at a time: the device may not have room for all.
        batch = module.transfer_batch_to_device(fresh(read[number % len(read)]), device, 0)
        clock.synchronise()
        clock.mark()
        with slowdown.slowed(), trainer.precision_plugin.predict_step_context():
            module(batch["input"])
        clock.mark()
        (seconds,) = clock.seconds()
        if number >= warmup:
            elapsed_s += seconds
            shapes += batch_size_of(batch)
        if elapsed_s > most_s:
            break
    return shapes / elapsed_s
