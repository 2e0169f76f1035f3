"""The task evaluate measures what was trained, and says or refuses what differs from that."""

from __future__ import annotations

import csv
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsepipe.config.build import build_data, build_module
from sparsepipe.config.finished_run import training_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.points import PointSet, Split
from sparsepipe.data.sources import GeneratedShapes
from sparsepipe.errors import ConfigError
from sparsepipe.launch.job import run_job
from sparsepipe.launch.prepare import prepare, resolve_run
from sparsepipe.models import Classifier, sparse_vgg11_bn
from sparsepipe.runs.checkpoints import read_checkpoint
from sparsepipe.tasks.evaluate import Evaluate
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, composed, rows
from tests.support.resolved import resolved

TRAINED = (
    *("data=shapes", "model=sparse_vgg11_bn", "parallel=single", "optim=sgd_onecycle"),
    *("data.source.classes=[mug,wheel,gear]", "data.source.train_per_class=8"),
    *("data.source.test_per_class=8", "data.val_share=0.25", "data.cached_points=512"),
    *("data.num_points=256", "data.resolution=12", "data.batch_size=8", "data.num_workers=0"),
    *("data.cache_workers=1", "model.width=0.0625", "trainer.max_epochs=3", "task.gallery=0"),
    *("hardware.accelerator=cpu", "seed=3", "data.span=cube"),
)
EVALUATED = ("task=evaluate", "task.gallery=0", "task.timed_batches=1", "task.warmup_batches=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("evaluated"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Path.cwd()


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return run_job(composed(*TRAINED)).path


own_network = sparse_vgg11_bn  # by another name, as one that is not this package's


class Reversed(GeneratedShapes):
    """The same shapes, with the classes in the opposite order."""

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        points = super().load(split, cache)
        labels_S = len(points.classes) - 1 - points.labels_S
        return replace(points, classes=points.classes[::-1], labels_S=labels_S)


def evaluated(run: Path, *overrides: str) -> dict[str, object]:
    spec = composed(*EVALUATED, f"checkpoint={run}", *overrides)
    return dict(read_json(run_job(spec).path / "result.json"))


def test_the_checkpoint_alone_gives_the_tests_figures(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trained, again = read_json(run / "result.json"), evaluated(run)
    for name in ("test/accuracy", "test/loss", "test/accuracy/mug"):
        assert again[name] == trained[name]
    assert trained["tested_checkpoint"] == again["evaluated_checkpoint"] == "best.ckpt"
    assert "differs_from_training" not in again
    assert f"model, data and backend are those of {run / 'config.yaml'}" in caplog.text


def test_each_test_sample_has_a_row(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each class's counts are those of confusion.csv, and wrong ones are found by their file."""
    caplog.set_level(logging.INFO)
    directory = run_job(composed(*EVALUATED, f"checkpoint={run}", "force=true")).path
    table = csv_rows(directory / "predictions.csv")
    assert list(table[0]) == ["file", "class", "predicted", "probability"]
    for row in table:
        assert Path(row["file"]).is_file()
        assert Path(row["file"]).parts[-3:-1] == (row["class"], "test")
        assert 1 / 3 <= float(row["probability"]) <= 1
    wrong = [row for row in table if row["class"] != row["predicted"]]
    assert (
        f"{len(wrong)} of 24 predictions are wrong: {directory / 'predictions.csv'}" in caplog.text
    )
    counts = Counter((row["class"], row["predicted"]) for row in table)
    counted = csv_rows(directory / "confusion.csv")
    assert {(r["actual"], r["predicted"]): int(r["shapes"]) for r in counted} == {
        (r["actual"], r["predicted"]): counts[r["actual"], r["predicted"]] for r in counted
    }
    assert len(table) == len({row["file"] for row in table}) == 24


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["dp", "pipeline"])
def test_each_row_is_the_same_on_several_ranks(run: Path, parallel: str) -> None:
    words = (*EVALUATED, f"checkpoint={run}")
    table = csv_rows(run_job(composed(*words)).path / "predictions.csv")
    several = composed(*words, "hardware.cpu_devices=2", f"parallel={parallel}")
    others = csv_rows(run_job(several).path / "predictions.csv")
    assert [row["file"] for row in others] == [row["file"] for row in table]
    for row, other in zip(table, others, strict=True):
        assert other["predicted"] == row["predicted"]
        assert float(other["probability"]) == pytest.approx(float(row["probability"]), abs=1e-6)


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_other_weights_are_tested_where_somebody_says_so(run: Path) -> None:
    """The best of three epochs is not the last."""
    best = max(float(row["val/accuracy"]) for row in rows(run))
    epoch = checkpoint(run, "best")["callbacks"]["RunCheckpoint"]["epoch"]
    assert float(rows(run)[epoch - 1]["val/accuracy"]) == best
    last = run_job(composed(*TRAINED, "task.test_weights=last")).path
    assert last != run
    result = read_json(last / "result.json")
    assert "tested_checkpoint" not in result
    file = last / "checkpoints" / "last.ckpt"
    assert evaluated(file)["test/loss"] == result["test/loss"]
    assert epoch < 3
    assert result["test/loss"] != read_json(run / "result.json")["test/loss"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("data.resolution=16",), "data.resolution=16 (trained with 12)"),
        (("data.span=extent",), "data.span=extent (trained with cube)"),
        (("data.num_points=null",), "data.num_points=null (trained with 256)"),
        (("~data.num_points",), "data.num_points=4096 (trained with 256)"),
        (("data=shapes",), "data.resolution=32 (trained with 12)"),
        (("model.width=0.125",), "model.width=0.125 (trained with 0.0625)"),
        (("model=sparse_vgg13_bn",), "model._target_"),
        (("data.resolution=16", "data.span=extent", "task.allow=[data.span]"), "data.resolution"),
    ],
)
def test_what_contradicts_the_training_is_refused(
    run: Path, overrides: tuple[str, ...], key: str
) -> None:
    spec = composed("task=evaluate", f"checkpoint={run}", *overrides)
    with pytest.raises(ConfigError, match="contradicts the training") as caught:
        prepare(resolve_run(spec))
    assert key in caught.value.message
    assert "task.allow=[" in caught.value.remedy


def test_what_is_meant_is_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ("data.resolution=6", "task.allow=[data.resolution]", "data.batch_size=5")
    found = evaluated(run, *settings)
    assert set(str(found["differs_from_training"]).split("; ")) == {
        "data.resolution=6 (trained with 12)",
        "data.batch_size=5 (trained with 8)",
    }
    assert found["test/loss"] != read_json(run / "result.json")["test/loss"]
    assert "but data.resolution=6 (trained with 12)" in caplog.text


def test_settings_follow_seeds_as_in_the_training(run: Path) -> None:
    names = ("task=evaluate", f"checkpoint={run}")
    spec = composed(*names)
    assert (spec.seed, spec.data.get("seed"), spec.data.get("resolution")) == (3, 3, 12)
    spec = composed(*names, "seed=5")
    assert (spec.seed, spec.data.get("seed")) == (5, 5)
    assert composed(*names, "data.root=elsewhere").data.get("root") == "elsewhere"
    dense = composed(*names, "model=dense_vgg11_bn")
    assert (dense.representation, dense.data.get("representation")) == ("dense", "dense")


def test_classes_in_another_order_are_refused(run: Path) -> None:
    other = ("data.source._target_=tests.unit.tasks.test_evaluate.Reversed",)
    with pytest.raises(ConfigError, match="in another order than") as caught:
        evaluated(run, *other)
    assert "task.allow=[classes]" in caught.value.remedy
    assert "differs_from_training" in evaluated(run, *other, "task.allow=[classes]")


def test_a_file_that_left_its_run_says_itself_what_it_is_of(run: Path, place: Path) -> None:
    file = place / "moved.ckpt"
    shutil.copy(run / "checkpoints" / "best.ckpt", file)
    assert evaluated(file)["test/loss"] == read_json(run / "result.json")["test/loss"]
    with pytest.raises(ConfigError, match="contradicts the training"):
        prepare(resolve_run(composed("task=evaluate", f"checkpoint={file}", "data.resolution=16")))
    content = torch.load(file, weights_only=True)
    record = content["sparsepipe"]
    assert record["classes"] == ["gear", "mug", "wheel"]
    assert record["config"]["data"]["resolution"] == 12
    assert {"sparsepipe", "torch", "python"} <= record["versions"].keys()
    record["config"]["data"]["cache_dir"] = str(place / "of others")
    torch.save(content, file)
    found = composed("task=evaluate", f"checkpoint={file}")
    assert found.data.get("cache_dir") == "data/cache", "it does not say where files are written"
    record["config"]["model"]["_target_"] = own = f"{__name__}.own_network"
    torch.save(content, file)
    with pytest.raises(ConfigError, match="names the callable"):
        composed("task=evaluate", f"checkpoint={file}")
    assert evaluated(file, f"model._target_={own}")["model"] == "own_network"


class Vouched:
    """Somebody's own, which a callback keeps in a checkpoint."""


def test_what_a_file_says_counts_whatever_else_it_holds(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = checkpoint(run, "best")
    torch.save({**content, "best_score": np.float64(0.5)}, place / "numbers.ckpt")
    found = evaluated(place / "numbers.ckpt")
    assert found["test/loss"] == read_json(run / "result.json")["test/loss"]
    torch.save({**content, "kept": Vouched()}, place / "vouched.ckpt")
    spec = composed(*EVALUATED, f"checkpoint={place / 'vouched.ckpt'}")
    with torch.serialization.safe_globals([Vouched]):
        content = read_checkpoint(place / "vouched.ckpt")
    run = resolved(spec)
    assert run.training is None
    monkeypatch.setattr("sparsepipe.tasks.evaluate.read_checkpoint", lambda path: content)
    with pytest.raises(ConfigError, match="values that cannot be read before your own modules"):
        Evaluate().run(run)


@pytest.mark.parametrize("text", ["a: [1\nb: }", "", None])
def test_a_run_without_a_readable_configuration(run: Path, text: str | None) -> None:
    damaged = run.parent / "damaged"
    shutil.copytree(run, damaged)
    if text is None:
        (damaged / "config.yaml").unlink()
    else:
        (damaged / "config.yaml").write_text(text)
    for source in (damaged, damaged / "checkpoints" / "last.ckpt"):
        training = training_of(str(source))
        assert training is not None
        assert training.values["data"]["resolution"] == 12
    shutil.rmtree(damaged)


def test_what_nobody_knows_is_said(
    run: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(checkpoint(run, "best")["state_dict"], place / "weights.pt")
    settings = [word for word in TRAINED if word.startswith(("data", "model", "seed", "hardware"))]
    found = evaluated(place / "weights.pt", *settings)
    assert found["test/loss"] == read_json(run / "result.json")["test/loss"]
    assert "is unknown: model and data are as configured" in caplog.text


def test_the_classifier_is_loaded_from_a_checkpoint_alone(run: Path) -> None:
    module = Classifier.load_from_checkpoint(run / "checkpoints" / "best.ckpt")
    spec = RunSpec.load(run / "config.yaml")
    data = build_data(spec)
    data.setup("test")
    expected = build_module(spec, data)
    expected.load_state_dict(checkpoint(run, "best")["state_dict"])
    assert module.class_names == tuple(data.classes)
    batch = next(iter(data.test_dataloader()))
    with torch.inference_mode():
        assert torch.equal(module.eval()(batch["input"]), expected.eval()(batch["input"]))
    optimizer = module.make_optimizer(module.parameters())
    assert (type(optimizer), optimizer.defaults["nesterov"]) == (torch.optim.SGD, True)


@pytest.mark.full
def test_each_job_of_a_sweep_takes_its_own_runs(shell: Shell) -> None:
    runs = [shell(f"model.width={width}", "trainer.max_epochs=1").run for width in (5, 6)]
    done = shell.sweep("task=evaluate", f"checkpoint={runs[0]},{runs[1]}", "name=evaluated")
    assert done.code == 0, done.err
    found = [read_json(run / "result.json") for run in shell.cwd.glob("outputs/evaluated/*/")
             if (run / "DONE.json").exists()]  # fmt: skip
    assert sorted(each["model.width"] for each in found) == [5, 6]
