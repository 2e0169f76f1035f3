"""Log lines and pictures of a run.

Shape suffixes: N voxels, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from sparsepipe.data import DomainDataModule
from sparsepipe.models import DomainSeparation
from sparsepipe.models.cases import CaseScores, mean_dice
from sparsepipe.partition.activation_checkpointing.setting import in_words
from sparsepipe.partition.explanation import rank_times
from sparsepipe.runs.metrics import read_rows
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.simulate.workload import Workload
from sparsepipe.strategies import StagedStrategy
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import write_csv

log = logging.getLogger(__name__)

_RECONSTRUCTED = 4
"""Number of samples of each domain in the picture of reconstructions."""


class StartLine(pl.Callback):
    """Logs one line about network, processes and data when training begins.

    Attributes:
        test_shapes: number of test samples, set before training begins.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self.test_shapes = 0
        self._network = ""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":  # at its setup, every rank still has the whole network
            return
        layers = getattr(pl_module, "layers", None)
        classes = getattr(pl_module, "class_names", ())
        parts = [f"{len(layers)} layers"] if isinstance(layers, nn.Sequential) else []
        parts.append(f"{sum(p.numel() for p in pl_module.parameters()):,} parameters")
        parts += [f"{len(classes)} classes"] if classes else []
        self._network = f"{self._run.spec.model.name}: {', '.join(parts)}"

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        run, limits = self._run, self._run.spec.trainer
        names = {device.name for host in run.inventory.hosts for device in host.devices}
        processes = "1 process" if run.ranks == 1 else f"{run.ranks} processes"
        where = f"{processes} on {run.inventory.accelerator} ({', '.join(sorted(names))})"
        counts = (
            (num_shapes(trainer.train_dataloader), "to train on", limits.limit_train_batches),
            (num_shapes(trainer.val_dataloaders), "to validate", limits.limit_val_batches),
            (self.test_shapes, "to test", limits.limit_test_batches),
        )
        shapes = ", ".join(
            f"{count:,} {use}" + ("" if limit is None else f" (batches limited to {limit})")
            for count, use, limit in counts
            if count
        )
        parts = [self._network, where + _stages_text(run, trainer)]
        log.info("; ".join([*parts, *([f"samples: {shapes}"] if shapes else [])]))


def _stages_text(run: ResolvedRun, trainer: pl.Trainer) -> str:
    """Describes the stages and the schedule of a pipeline; empty for other strategies."""
    strategy = trainer.strategy
    if not isinstance(strategy, StagedStrategy):
        return ""
    plan, parallel = strategy.plan, run.spec.parallel
    cuts = f" cut at layer {', '.join(map(str, plan.cuts))}" if plan.cuts else ""
    for number, stage in enumerate(plan.stages):
        if stage.grid is not None:
            cuts += f", stage {number} on a grid of {' x '.join(map(str, stage.grid))}"
    if (synchronous := parallel.synchronous) is None:
        how = parallel.argument("mode", "stash")
    else:
        how = f"{synchronous.schedule}, {synchronous.microbatches} microbatches"
    if any(strategy.recomputed):
        how += f", recomputing layers {in_words(strategy.recomputed)}"
    return f", as a pipeline {plan.config}{cuts} ({how})"


def num_shapes(loaders: Any) -> int:
    """Returns the number of shapes in the data sets of one or several loaders; 0 if unknown."""
    found = loaders if isinstance(loaders, (list, tuple)) else [loaders]
    datasets = [getattr(loader, "dataset", None) for loader in found]
    return sum(len(dataset) for dataset in datasets if isinstance(dataset, Sized))


def class_accuracies(module: pl.LightningModule) -> dict[str, float]:
    """Returns ``test/accuracy/<class>``, from 0 to 1, for each class that has test shapes."""
    counts_KK = getattr(module, "test_confusion", None)
    if counts_KK is None:
        return {}
    return {
        f"test/accuracy/{name}": float(counts_KK[k, k] / counts_KK[k].sum())
        for k, name in enumerate(getattr(module, "class_names", ()))
        if counts_KK[k].sum()
    }


def log_planned(run: ResolvedRun, values: Mapping[str, Any]) -> None:
    """Logs what share of the training time profiling for the plan took, and the measured rate next
    to two that the search expected: of the slowest stage or transfer alone, and of whole epochs.
    """
    if "profiling_share_of_training" in values:
        told = "the plan's profiles took %.0f s, %.1f %% of the %.0f s of training"
        share = 100 * values["profiling_share_of_training"]
        log.info(told, values["profiling_s"], share, values["train_time_s"])
    planned, measured = values.get("plan_shapes_per_s"), values.get("train_shapes_per_s")
    if not planned or not measured:
        return
    plan, synchronous = Plan.load(run.directory.plan), run.spec.parallel.synchronous
    loads_s = [each["load"] for each in rank_times(plan) if "load" in each]
    text = f"with {1e3 * max(loads_s):.1f} ms of loading a batch" if loads_s else "no loading"
    epochs, workload = len(read_rows(run.directory.metrics)), Workload.expected(plan)
    rounds = int(values["steps"]) // epochs if epochs else 0  # every reader takes a batch in each
    if rounds and workload is not None:
        setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
        if synchronous is None:
            pace = Simulation.of(workload, setting).pace(rounds * plan.replicas(0))
        else:
            name, parts = synchronous.schedule, synchronous.microbatches
            made = Simulation.of(workload, setting, schedule=name, microbatches=parts)
            pace = made.pace(rounds)
        shapes = rounds * plan.replicas(0) * int(run.spec.data.get("batch_size"))
        rate = min(planned, shapes / pace.total_s)
        text += f"; {rate:.1f} with filling and draining in epochs of {rounds} steps"
    log.info(
        "trained %.1f shapes/s, planned %.1f (the plan's slowest stage or transfer, %s); "
        "trainer.trace=true shows where the time goes",
        measured,
        planned,
        text,
    )


def log_test(run: ResolvedRun, module: pl.LightningModule, values: Mapping[str, Any]) -> None:
    """Logs a test's results, the speed of inference, and the paths of the run's pictures."""
    parts = []
    if "test/accuracy" in values:
        mean = values.get("test/class_accuracy")
        over = "" if mean is None else f" (mean over classes {100 * mean:.1f} %)"
        parts.append(f"test accuracy {100 * values['test/accuracy']:.1f} %{over}")
    if "test/mean_iou" in values:
        parts.append(f"mean IoU {100 * values['test/mean_iou']:.1f} %")
    if "test/mean_dice" in values:
        parts.append(f"mean Dice of a case {100 * values['test/mean_dice']:.1f} %")
    counts_KK = getattr(module, "test_confusion", None)
    if counts_KK is not None:
        lost = int(counts_KK[:, len(counts_KK) :].sum())
        wrong = f", of which {lost:,} have a prediction that is not finite: wrong" if lost else ""
        counted = getattr(module, "counted", "shapes")
        parts.append(f"{int(counts_KK.sum()):,} {counted}{wrong}")
    if values.get("inference_shapes_per_s"):
        rate = values["inference_shapes_per_s"]
        parts.append(f"inference {rate:,.{0 if rate >= 10 else 2}f} shapes/s")
    if parts:
        log.info("%s", ", ".join(parts))
    pictures = run.directory.path.glob("*.png"), (run.directory.path / "cases").glob("*.png")
    for picture in (path for each in pictures for path in sorted(each)):
        log.info("picture: %s", picture)


def draw_test(
    run: ResolvedRun,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    *,
    gallery: int,
) -> None:
    """If the module has counted a confusion matrix, draws it, the accuracy of each class and at
    most ``gallery`` predictions, and writes the matrix to ``confusion.csv``.
    """
    from sparsepipe.plots import style
    from sparsepipe.plots.confusion import confusion_figure, confusion_rows, per_class_figure

    if isinstance(module, DomainSeparation) and isinstance(data, DomainDataModule):
        _draw_domains(run, module, data)
        return
    counts_KK = getattr(module, "test_confusion", None)
    classes = tuple(getattr(module, "class_names", ()))
    if counts_KK is None or not classes:
        return
    directory = run.directory.path
    counted = getattr(module, "counted", "shapes")
    rows = confusion_rows(counts_KK.numpy(), classes, counted=counted)
    write_csv(run.directory.confusion, rows)
    figure = confusion_figure(counts_KK.numpy(), classes, counted=counted)
    style.save_png(figure, directory / "confusion.png")
    picture = directory / "per_class_accuracy.png"
    style.save_png(per_class_figure(counts_KK.numpy(), classes), picture)
    _draw_gallery(run, module, data, classes=classes, count=gallery)
    if getattr(module, "test_cases", None) is not None:
        _draw_cases(run, module, data, classes=classes)


def gather_cases(module: pl.LightningModule) -> None:
    """Gives every rank the worst and the best cases of all; every rank must call it."""
    cases = getattr(module, "cases", None)
    if isinstance(cases, CaseScores):
        for drawn in process_group.gather_objects(cases.drawn):
            cases.keep(drawn)


def _draw_cases(
    run: ResolvedRun, module: Any, data: pl.LightningDataModule, *, classes: tuple[str, ...]
) -> None:
    """Writes ``cases.csv``, the worst case first, and draws the worst and the best cases."""
    from sparsepipe.plots import style
    from sparsepipe.plots.volumes import case_figure

    scores, drawn = module.test_cases, module.cases.drawn
    found = scores["index"].reshape(-1).tolist()  # a single number of a single case
    files = dict(zip(found, _named_samples(data, found), strict=True))
    mean_S = mean_dice(scores["dice"])
    rows = []
    for s in mean_S.nan_to_num(nan=1).argsort(stable=True).tolist():
        for k, name in enumerate(classes):
            scored = {each: scores[each][s, k] for each in ("dice", "iou", "surface_mm")}
            values = {"mean_dice": mean_S[s], **scored}.items()
            cells = {each: "" if value.isnan() else float(value) for each, value in values}
            rows.append({"file": files[found[s]], "class": name, **cells})
    write_csv(run.directory.cases, rows)
    log.info("scores of %d cases, the worst first: %s", len(files), run.directory.cases)
    recorded: dict[str, Any] = getattr(data, "recorded", dict)()
    directions = (recorded.get("preparation") or {}).get("orientation") or ""
    half = (len(drawn) + 1) // 2
    for kind, cases in (("worst", drawn[:half]), ("best", drawn[half:][::-1])):
        for number, case in enumerate(cases, 1):
            if not case["slices"]:  # of one spatial dimension
                continue
            name = Path(files[case["index"]]).name
            title = f"{name}   mean Dice {100 * case['dice']:.1f} %"
            figure = case_figure(case["slices"], classes, title=title, directions=directions)
            style.save_png(figure, run.directory.path / "cases" / f"{kind}_{number}.png")


@torch.no_grad()
def _draw_gallery(
    run: ResolvedRun,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    *,
    classes: tuple[str, ...],
    count: int,
) -> None:
    """Draws ``predictions.png`` with at most ``count`` test shapes, spread over the split."""
    from sparsepipe.plots import style
    from sparsepipe.plots.gallery import gallery_figure

    loader = data.test_dataloader()
    dataset = getattr(loader, "dataset", None)
    if count < 1 or dataset is None or not len(dataset):
        return
    picked = np.unique(np.linspace(0, len(dataset) - 1, count).round().astype(int))
    # What the sampler yields is what the data set takes: an index, or epoch and index.
    example = next(iter(loader.sampler))
    keys = [(0, int(i)) if isinstance(example, tuple) else int(i) for i in picked]
    size = loader.batch_size or 1  # a batch larger than the test's may not fit into memory
    shapes: list[NDArray[np.float64]] = []
    found: dict[str, list[Any]] = {"label": [], "prediction": [], "probability": [], "index": []}
    module.eval()
    for first in range(0, len(keys), size):
        batch = loader.collate_fn([dataset[key] for key in keys[first : first + size]])
        if not isinstance(batch, dict) or not {"input", "label"} <= batch.keys():
            return
        x = batch["input"]
        is_cloud = hasattr(x, "coords") or (isinstance(x, Tensor) and x.dim() == 5)
        label = batch["label"]
        if not isinstance(label, Tensor) or label.dim() > 1 or not is_cloud:  # not of shapes
            return
        shapes += clouds(x)
        placed = {key: value.to(module.device) for key, value in batch.items()}
        prediction = {**batch, **module.predict_step(placed, 0)}
        for name in found.keys() & prediction.keys():
            found[name] += prediction[name].tolist()
    figure = gallery_figure(
        shapes,
        found["label"],
        found["prediction"],
        classes,
        probabilities=found["probability"],
        files=_named_samples(data, found["index"]) if found["index"] else None,
    )
    style.save_png(figure, run.directory.gallery)


def write_predictions(
    run: ResolvedRun, module: pl.LightningModule, data: pl.LightningDataModule
) -> None:
    """If the module has kept predictions, writes ``predictions.csv``: the file, class, predicted
    class and its probability for each test sample, in the order of the split.
    """
    from sparsepipe.plots import style

    found = getattr(module, "test_predictions", None)
    if found is None:
        return
    classes = tuple(getattr(module, "class_names", ()))
    values = {name: value.tolist() for name, value in found.items()}
    files = _named_samples(data, values["index"])
    rows = [
        {
            "file": file,
            "class": classes[values["label"][row]],
            "predicted": style.NOT_FINITE if (k := values["prediction"][row]) < 0 else classes[k],
            "probability": "" if k < 0 else values["probability"][row],
        }
        for row, file in enumerate(files)
    ]
    write_csv(run.directory.predictions, rows)
    wrong = int((found["label"] != found["prediction"]).sum())
    log.info("%d of %d predictions are wrong: %s", wrong, len(files), run.directory.predictions)


def _named_samples(data: pl.LightningDataModule, indices: Sequence[int]) -> list[str]:
    """Returns the file or name of each test sample in ``indices``; its index if it has neither."""
    names = getattr(data, "test_names", None)
    known = None if names is None else names()
    return [str(index) if known is None else known[index] for index in indices]


def _draw_domains(run: ResolvedRun, module: DomainSeparation, data: DomainDataModule) -> None:
    """Draws the confusion matrix of each labelled domain, and reconstructions of some samples."""
    from sparsepipe.plots import style
    from sparsepipe.plots.confusion import confusion_figure, confusion_rows
    from sparsepipe.plots.gallery import reconstructions_figure

    directory, classes = run.directory.path, module.class_names
    rows: list[dict[str, str | int]] = []
    found = {}
    for name, counts_KK in module.test_confusions.items():
        pairs = module.reconstructions(name, data.some_tested(name, count=_RECONSTRUCTED))
        found[name] = {kind: value.cpu().float().numpy() for kind, value in pairs.items()}
        if not counts_KK.sum():  # the domain has no labels
            continue
        of_domain = confusion_rows(counts_KK.numpy(), classes)
        rows += [{"domain": name, **row} for row in of_domain]
        figure = confusion_figure(counts_KK.numpy(), classes)
        style.save_png(figure, directory / f"confusion_{name}.png")
    if rows:
        write_csv(run.directory.confusion, rows)
    if found:
        style.save_png(reconstructions_figure(found), directory / "reconstructions.png")


def clouds(x: Any) -> list[NDArray[np.float64]]:
    """Returns the indices [N, 3] of occupied voxels for each sample in ``x``, a network's input."""
    if isinstance(x, Tensor):
        return [np.argwhere(grid.sum(dim=0).numpy() > 0).astype(float) for grid in x.cpu()]
    coords_N4 = x.coords.cpu().numpy()
    return [coords_N4[coords_N4[:, 0] == b, 1:].astype(float) for b in range(x.batch_size)]
