"""Log lines and pictures of a run.

Shapes: B samples, N points, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from sparsepipe.config.schema import Synchronous
from sparsepipe.data import DomainDataModule
from sparsepipe.errors import DataError
from sparsepipe.models import DomainSeparation
from sparsepipe.partition.activation_checkpointing.setting import in_words
from sparsepipe.partition.explanation import rank_times
from sparsepipe.runs.metrics import read_rows
from sparsepipe.schedule import Plan
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.simulate.workload import Workload
from sparsepipe.strategies import StagedStrategy
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.tables import write_csv

log = logging.getLogger(__name__)


class StartLine(pl.Callback):
    """Logs network, processes and data in one line as training begins.

    Attributes:
        test_shapes: how many there are to test on, once the data know the trainer.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self.test_shapes = 0
        self._network = ""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # while every rank has all of it
            self._network = network(self._run, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        limits = self._run.spec.trainer
        counts = (
            (num_shapes(trainer.train_dataloader), "to train on", limits.limit_train_batches),
            (num_shapes(trainer.val_dataloaders), "to validate", limits.limit_val_batches),
            (self.test_shapes, "to test", limits.limit_test_batches),
        )
        shapes = ", ".join(
            f"{count:,} {use}{limited(limit)}" for count, use, limit in counts if count
        )
        parts = [self._network, where(self._run) + split(self._run, trainer)]
        log.info("; ".join([*parts, *([f"shapes: {shapes}"] if shapes else [])]))


def limited(batches: int | float | None) -> str:
    """What ``trainer.limit_train_batches`` and its like leave of shapes, as text."""
    if batches is None:
        return ""
    if isinstance(batches, int):
        return f" (at most {batches} batch{'es' * (batches != 1)} of them)"
    return f" ({100 * batches:g} % of the batches)"


def network(run: ResolvedRun, module: pl.LightningModule) -> str:
    name = run.spec.model.name
    layers = getattr(module, "layers", None)
    parts = [f"{len(layers)} layers"] if isinstance(layers, nn.Sequential) else []
    parts.append(f"{sum(p.numel() for p in module.parameters()):,} parameters")
    classes = getattr(module, "class_names", ())
    return f"{name}: {', '.join([*parts, *([f'{len(classes)} classes'] if classes else [])])}"


def where(run: ResolvedRun) -> str:
    """The devices of a run, as text."""
    names = {device.name for host in run.inventory.hosts for device in host.devices}
    processes = "1 process" if run.ranks == 1 else f"{run.ranks} processes"
    return f"{processes} on {run.inventory.accelerator} ({', '.join(sorted(names))})"


def split(run: ResolvedRun, trainer: pl.Trainer) -> str:
    """The stages of a pipeline, as text."""
    strategy = trainer.strategy
    if not isinstance(strategy, StagedStrategy):
        return ""
    plan = strategy.plan
    cuts = f" cut at layer {', '.join(map(str, plan.cuts))}" if plan.cuts else ""
    for number, stage in enumerate(plan.stages):
        if stage.grid is not None:
            cuts += f", stage {number} on a grid of {' x '.join(map(str, stage.grid))}"
    parallel = run.spec.parallel
    if (synchronous := parallel.synchronous) is None:
        how = parallel.argument("mode", "stash")
    else:
        how = f"{synchronous.schedule}, {synchronous.microbatches} microbatches"
    if any(strategy.recomputed):
        how += f", recomputing layers {in_words(strategy.recomputed)}"
    return f", as a pipeline {plan.config}{cuts} ({how})"


def num_shapes(loaders: Any) -> int:
    """Shapes of the loaders over all ranks; 0 where unknown."""
    found = loaders if isinstance(loaders, (list, tuple)) else [loaders]
    datasets = [getattr(loader, "dataset", None) for loader in found]
    return sum(len(dataset) for dataset in datasets if isinstance(dataset, Sized))


def class_accuracies(module: pl.LightningModule) -> dict[str, float]:
    """``test/accuracy/<class>`` of every class that the test has shapes of."""
    counts_KK = getattr(module, "test_confusion", None)
    if counts_KK is None:
        return {}
    return {
        f"test/accuracy/{name}": float(counts_KK[k, k] / counts_KK[k].sum())
        for k, name in enumerate(getattr(module, "class_names", ()))
        if counts_KK[k].sum()
    }


def log_profiling(values: Mapping[str, Any]) -> None:
    """Logs the time that the profiles of a plan took."""
    if "profiling_share_of_training" in values:
        log.info(
            "the plan's profiles, measured for this run or before, took %.0f s, %.1f %% of the "
            "%.0f s of training",
            values["profiling_s"],
            100 * values["profiling_share_of_training"],
            values["train_time_s"],
        )


def log_planned(run: ResolvedRun, values: Mapping[str, Any]) -> None:
    """Logs the rate by a plan beside the measured one, what is in it and what is not."""
    planned, measured = values.get("plan_shapes_per_s"), values.get("train_shapes_per_s")
    if not planned or not measured:
        return
    plan = Plan.load(run.directory.plan)
    loads_s = [each["load"] for each in rank_times(plan) if "load" in each]
    loading = f"with {1e3 * max(loads_s):.1f} ms of loading a batch" if loads_s else "no loading"
    text = f"the plan's slowest stage or transfer, {loading}"
    epochs = len(read_rows(run.directory.metrics))
    rounds = int(values["steps"]) // epochs if epochs else 0
    if rounds and (epoch_s := planned_epoch_s(plan, rounds, run.spec.parallel.synchronous)):
        shapes = rounds * plan.replicas(0) * int(run.spec.data.get("batch_size"))
        rate = min(planned, shapes / epoch_s)
        text += f"; {rate:.1f} with filling and draining in epochs of {rounds} steps"
    log.info(
        "trained %.1f shapes/s, planned %.1f (%s): hooks, logging and copies of weights are not in "
        "it, nor that ranks and other programs slow each other down, since profiles are of one "
        "device at a time; trainer.trace=true shows where the time goes",
        measured,
        planned,
        text,
    )


def planned_epoch_s(plan: Plan, rounds: int, synchronous: Synchronous | None) -> float | None:
    """Seconds of an epoch by the times that the plan's search expected of its ranks, if messages
    took no time; None where it expected none.

    Args:
        plan: with its details.
        rounds: steps, in each of which every replica of the first stage reads a batch.
        synchronous: its schedule; None: the asynchronous one.
    """
    workload = Workload.expected(plan)
    if workload is None:
        return None
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
    if synchronous is None:
        made = Simulation.of(workload, setting)
        return made.pace(rounds * plan.replicas(0)).total_s
    parts = synchronous.microbatches
    made = Simulation.of(workload, setting, schedule=synchronous.schedule, microbatches=parts)
    return made.pace(rounds).total_s


def log_test(run: ResolvedRun, module: pl.LightningModule, values: Mapping[str, Any]) -> None:
    """Logs the results of a test, its speed and its pictures."""
    parts = []
    if "test/accuracy" in values:
        mean = values.get("test/class_accuracy")
        over = "" if mean is None else f" (mean over classes {100 * mean:.1f} %)"
        parts.append(f"test accuracy {100 * values['test/accuracy']:.1f} %{over}")
    if "test/mean_iou" in values:
        parts.append(f"mean IoU {100 * values['test/mean_iou']:.1f} %")
    counts_KK = getattr(module, "test_confusion", None)
    if counts_KK is not None:
        noun = "voxels" if "test/mean_iou" in values else "shapes"
        parts.append(f"{int(counts_KK.sum()):,} {noun}")
    if values.get("inference_shapes_per_s"):
        parts.append(f"inference {values['inference_shapes_per_s']:,.0f} shapes/s")
    if parts:
        log.info("%s", ", ".join(parts))
    for picture in sorted(run.directory.path.glob("*.png")):
        log.info("picture: %s", picture)


def draw_curves(run: ResolvedRun, *, tested: str) -> None:
    """``learning_curves.png`` from ``metrics.csv``; nothing where nothing was logged.

    ``tested`` says which weights were tested, ``best`` or ``last``.
    """
    from sparsepipe.plots import style
    from sparsepipe.plots.curves import learning_curves_figure

    if not run.directory.metrics.exists():
        return
    try:
        picture = run.directory.path / "learning_curves.png"
        style.save_png(learning_curves_figure(run.directory.metrics, tested=tested), picture)
    except DataError as error:
        log.info("no learning curves: %s", error.message)


def draw_test(
    run: ResolvedRun, module: pl.LightningModule, data: pl.LightningDataModule, *, gallery: int
) -> None:
    """Confusion, per-class accuracies and ``gallery`` predictions, for modules that keep them.

    The counts of the confusion as ``confusion.csv`` as well.
    """
    from sparsepipe.plots import style
    from sparsepipe.plots.confusion import confusion_figure, confusion_rows, per_class_figure
    from sparsepipe.plots.gallery import gallery_figure

    if isinstance(module, DomainSeparation) and isinstance(data, DomainDataModule):
        _draw_domains(run, module, data)
        return
    counts_KK = getattr(module, "test_confusion", None)
    classes = tuple(getattr(module, "class_names", ()))
    if counts_KK is None or not classes:
        return
    directory = run.directory.path
    write_csv(run.directory.confusion, confusion_rows(counts_KK.numpy(), classes))
    style.save_png(confusion_figure(counts_KK.numpy(), classes), directory / "confusion.png")
    picture = directory / "per_class_accuracy.png"
    style.save_png(per_class_figure(counts_KK.numpy(), classes), picture)
    shapes: list[NDArray[np.float64]] = []
    found: dict[str, list[Any]] = {"label": [], "prediction": [], "probability": []}
    indices: list[int] = []
    for batch in gallery_batches(data, count=gallery):
        shapes += clouds(batch["input"])
        prediction = _predict(module, batch)
        indices += batch["index"].tolist() if "index" in batch else []
        for name in found:
            found[name] += prediction[name].tolist()
    if shapes:
        figure = gallery_figure(
            shapes,
            found["label"],
            found["prediction"],
            classes,
            probabilities=found["probability"],
            files=_named_samples(data, indices) if indices else None,
        )
        style.save_png(figure, run.directory.gallery)


def write_predictions(
    run: ResolvedRun, module: pl.LightningModule, data: pl.LightningDataModule
) -> None:
    """``predictions.csv`` of a test: its samples with their files, in the order of the split.

    Nothing where the module keeps no predictions of samples.
    """
    found = getattr(module, "test_predictions", None)
    if found is None:
        return
    classes = tuple(getattr(module, "class_names", ()))
    values = {name: value.tolist() for name, value in found.items()}
    files = _named_samples(data, values["index"])
    write_csv(
        run.directory.predictions,
        [
            {
                "file": files[row],
                "class": classes[values["label"][row]],
                "predicted": classes[values["prediction"][row]],
                "probability": values["probability"][row],
            }
            for row in range(len(files))
        ],
    )
    wrong = int((found["label"] != found["prediction"]).sum())
    log.info("%d of %d samples are wrong: %s", wrong, len(files), run.directory.predictions)


def _named_samples(data: pl.LightningDataModule, indices: Sequence[int]) -> list[str]:
    """The file of each test sample, or its name or number, by numbers in the split."""
    names = getattr(data, "test_names", None)
    known = None if names is None else names()
    return [str(index) if known is None else known[index] for index in indices]


def _draw_domains(run: ResolvedRun, module: DomainSeparation, data: DomainDataModule) -> None:
    """Confusion of each domain that was tested, and reconstructions of some samples."""
    from sparsepipe.plots import style
    from sparsepipe.plots.confusion import confusion_figure, confusion_rows
    from sparsepipe.plots.gallery import reconstructions_figure

    directory, classes = run.directory.path, module.class_names
    rows: list[dict[str, str | int]] = []
    for name, counts_KK in module.test_confusions.items():
        if not counts_KK.sum():  # it has no labels
            continue
        of_domain = confusion_rows(counts_KK.numpy(), classes)
        rows += [{"domain": name, **row} for row in of_domain]
        figure = confusion_figure(counts_KK.numpy(), classes)
        style.save_png(figure, directory / f"confusion_{name}.png")
    if rows:
        write_csv(run.directory.confusion, rows)
    if not module.test_confusions:
        return
    found = {
        name: module.reconstructions(name, data.some_tested(name, count=_RECONSTRUCTED))
        for name in module.test_confusions
    }
    pictures = {
        name: {k: v.cpu().float().numpy() for k, v in each.items()} for name, each in found.items()
    }
    style.save_png(reconstructions_figure(pictures), directory / "reconstructions.png")


_RECONSTRUCTED = 4
"""Samples of each domain in the picture of reconstructions."""


def gallery_batches(data: pl.LightningDataModule, *, count: int) -> Iterator[dict[str, Any]]:
    """Test shapes spread evenly over the split, hence over its classes.

    In batches no larger than the test's, since more need not fit into memory.
    """
    loader = data.test_dataloader()
    dataset = getattr(loader, "dataset", None)
    if count < 1 or dataset is None or not len(dataset):
        return
    picked = np.unique(np.linspace(0, len(dataset) - 1, count).round().astype(int))
    # What the sampler yields is what the data set takes: an index, or epoch and index.
    example = next(iter(loader.sampler))
    keys = [(0, int(i)) if isinstance(example, tuple) else int(i) for i in picked]
    size = loader.batch_size or 1
    for first in range(0, len(keys), size):
        batch = loader.collate_fn([dataset[key] for key in keys[first : first + size]])
        if not _holds_clouds(batch):
            return
        yield batch


def _holds_clouds(batch: Any) -> bool:
    if not isinstance(batch, dict) or not {"input", "label"} <= batch.keys():
        return False
    x = batch["input"]
    if batch["label"].dim() > 1:  # of voxels: no shape is of one class
        return False
    return hasattr(x, "coords") or (isinstance(x, Tensor) and x.dim() == 5)


def clouds(x: Any) -> list[NDArray[np.float64]]:
    """Centres [N, 3] of the occupied voxels of each sample, as the network sees them."""
    if isinstance(x, Tensor):
        return [np.argwhere(grid.sum(dim=0).numpy() > 0).astype(float) for grid in x.cpu()]
    coords_N4 = x.coords.cpu().numpy()
    return [coords_N4[coords_N4[:, 0] == b, 1:].astype(float) for b in range(x.batch_size)]


@torch.no_grad()
def _predict(module: pl.LightningModule, batch: dict[str, Any]) -> dict[str, Tensor]:
    module.eval()
    placed = {key: value.to(module.device) for key, value in batch.items()}
    prediction: dict[str, Tensor] = module.predict_step(placed, 0)
    return prediction
