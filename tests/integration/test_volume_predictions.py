"""The task predict on volumes: a folder of unlike files, cases of several files, and a grid."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch

import sparsepipe
from sparsepipe.data.volumes.preparation import Preparation
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.launch.job import run_job
from sparsepipe.models import unet3d
from sparsepipe.runs.model import VolumeModel
from sparsepipe.tasks.predict_volumes import compute_on_grid
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import read_csv, read_json
from tests.support.command_line import composed
from tests.support.processes import run_shared

Job = Callable[..., Path]
TRAINING = (
    *("data=volume_files", "data.root=data", "data.labels=voxel", "data.batch_size=2"),
    *("data.source.classes=[outside,block]", "data.source.intensity=zscore", "data.num_workers=0"),
    *("model=unet3d", "model.levels=2", "model.width=0.125", "optim=adamw"),
    *("trainer.max_epochs=8", "trainer.precision=64-true", "task.gallery=0", "seed=1"),
    *("hardware=cores", "parallel=single", "parallel.devices=1"),
)
TURNED = ("data.source.orientation=RAS", "data.source.spacing=[1.2,1.2,1.2]")


def write_scan(folder: Path, name: str, seed: int, *, suffix: str = ".nii.gz") -> None:
    """Writes a scan with a bright block in a random place, orientation, size and spacing, and its
    labels into the folders ``inputs`` and ``labels``.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(14, 20, 3)
    values, labels = rng.normal(0, 10, sizes).astype(np.float32), np.zeros(sizes, np.uint8)
    block = tuple(slice(first, first + 6) for first in rng.integers(2, sizes - 8))
    values[block] += 100
    labels[block] = 1
    directions_33 = np.eye(3)[rng.permutation(3)] * rng.choice([-1, 1], 3)
    spacing, origin = rng.uniform(0.9, 1.5, 3), rng.uniform(-50, 50, 3)
    for kind, array in (("inputs", values), ("labels", labels)):
        path = folder / kind / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = sitk.GetImageFromArray(array.T)
        image.SetSpacing(spacing.tolist())
        image.SetOrigin(origin.tolist())
        image.SetDirection(directions_33.ravel().tolist())
        sitk.WriteImage(image, str(path))


def predicted(run: Path, files: str, *overrides: str) -> Path:
    words = ("task=predict", f"checkpoint={run}", f"input={files}", "hardware=cores")
    single = ("parallel=single", "parallel.devices=1")
    return run_job(composed(*words, *single, *overrides)).path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A training on patches; its data are gone; unlike scans are in the folder new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("volumes"))
        patch.setenv("OMP_NUM_THREADS", "1")
        for number in range(6):
            suffix = (".nii.gz", ".nrrd")[number % 2]
            write_scan(Path("data"), f"scan{number}", number, suffix=suffix)
        found = run_job(composed(*TRAINING, *TURNED, "data.patch=[12,12,12]")).path
        shutil.rmtree("data/inputs")
        for number, name in enumerate(("a.nii.gz", "a.nrrd", "deep/c.mha", "deep/a.nii")):
            stem, _, suffix = name.partition(".")
            write_scan(Path("new"), stem, 20 + number, suffix=f".{suffix}")
        Path("new/inputs/broken.nii").write_text("junk")
        Path("new/inputs/notes.md").touch()
        yield found


def dice(path: Path, of: Path) -> float:
    found, true = (sitk.GetArrayFromImage(sitk.ReadImage(str(each))) == 1 for each in (path, of))
    return float(2 * (found & true).sum() / (found.sum() + true.sum()))


def test_a_folder_gets_label_volumes_tables_and_pictures(run: Path) -> None:
    directory = predicted(run, "new/inputs", "task.probabilities=true", "task.gallery=4")
    names = ("a.nii.gz", "a.nrrd", "deep/c.mha", "deep/a.nii")
    model = sparsepipe.load(run)
    rows = {row["file"]: row for row in read_csv(directory / "predictions.csv", "file")}
    assert {*rows} == {f"new/inputs/{name}" for name in (*names, "broken.nii")}
    for name in names:
        path, source = directory / "volumes" / name, f"new/inputs/{name}"
        assert dice(path, Path("new/labels") / name) > 0.6
        image, given = sitk.ReadImage(str(path)), sitk.ReadImage(source)
        for of in ("GetSize", "GetSpacing", "GetOrigin", "GetDirection"):
            wanted = getattr(given, of)()
            np.testing.assert_allclose(getattr(image, of)(), wanted, rtol=1e-6, atol=1e-6)
        labels = sitk.GetArrayFromImage(image).T
        assert np.array_equal(model.predict(source), labels)
        row, voxel_ml = rows[source], np.prod(given.GetSpacing()) / 1000
        for value, each in enumerate(("outside", "block")):
            assert int(row[f"voxels/{each}"]) == (count := (labels == value).sum())
            assert float(row[f"ml/{each}"]) == pytest.approx(count * voxel_ml, rel=1e-5)
        probabilities, suffix = directory / "probabilities" / name, name.partition(".")[2]
        values_K = sitk.GetArrayFromImage(sitk.ReadImage(str(probabilities)))
        if suffix.startswith("nii"):
            values_K = np.moveaxis(np.asarray(nibabel.load(probabilities).dataobj).T, 0, -1)
        assert np.array_equal(values_K.argmax(-1).T, labels)
        np.testing.assert_allclose(values_K.sum(-1), 1, atol=1e-5)
    assert rows["new/inputs/broken.nii"]["error"]
    known, result = (read_json(directory / f"{name}.json") for name in ("predictions", "result"))
    assert (result["predicted_files"], result["unreadable_files"]) == (4, 1)
    written = [name for each in known["predictions"] for name in each["written"]]
    folders = ("volumes", "probabilities", "pictures")
    files = [f for name in folders for f in (directory / name).rglob("*") if f.is_file()]
    assert {*written} == {each.relative_to(directory).as_posix() for each in files}
    assert {*written} >= {"pictures/a.nii.gz.png", "pictures/a.nrrd.png"}
    assert not [*directory.glob(".*/")], "temporary files are removed"


def test_windows_flips_and_probabilities_make_other_runs(run: Path) -> None:
    first = predicted(run, "new/inputs/a.nii.gz")
    assert not (first / "probabilities").exists()
    others = ("task.flips=true", "task.overlap=0.25", "task.probabilities=true")
    assert len({first, *(predicted(run, "new/inputs/a.nii.gz", each) for each in others)}) == 4
    before = Path("new/inputs/a.nii.gz").read_bytes()
    with pytest.raises(DataError):
        sparsepipe.load(run).predict("new/inputs/a.nii.gz", save="new/inputs/a.nii.gz")
    assert Path("new/inputs/a.nii.gz").read_bytes() == before
    with pytest.raises(DataError, match="none of 1 volumes can be labelled"):
        predicted(run, "new/inputs/broken.nii")
    with pytest.raises(ConfigError):
        predicted(run, "new/inputs", "parallel=dp", "parallel.devices=2")
    grid = ("parallel=spatial", "parallel.devices=2", "task.flips=true")
    with pytest.raises(ConfigError):
        predicted(run, "new/inputs", *grid)


def test_cases_of_several_files_are_found_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, count in (("data", 4), ("new", 2)):
        for number in range(count):
            write_scan(Path(folder), f"{number}", number)
            place = Path(folder, "inputs")
            shutil.copy(place / f"{number}.nii.gz", place / f"{number}_T1.nii.gz")
            (place / f"{number}.nii.gz").rename(place / f"{number}_T2.nii.gz")
    channels = ("data.source.channels=[_T1,_T2]", "model.in_channels=2", "data.patch=[8,8,8]")
    run = run_job(composed(*TRAINING, *channels, "trainer.max_epochs=1")).path
    Path("new/inputs/1_T2.nii.gz").unlink()
    directory = predicted(run, "new/inputs")
    rows = {row["file"]: row for row in read_csv(directory / "predictions.csv", "file")}
    assert [bool(row["error"]) for row in rows.values()] == [False, True]
    found = sparsepipe.load(run).predict([f"new/inputs/0_{name}.nii.gz" for name in ("T1", "T2")])
    image = nibabel.load(directory / "volumes/0.nii.gz")
    assert np.array_equal(np.asarray(image.dataobj), found)
    Path("new/inputs/1_T1.nii.gz").rename("new/inputs/2_T2.nii.gz")
    assert predicted(run, "new/inputs") != directory
    assert "2_T2.nii.gz" in caplog.text
    first = predicted(run, "new/inputs/*_T1.nii.gz")
    shutil.copy("new/inputs/2_T2.nii.gz", "new/inputs/0_T2.nii.gz")
    with pytest.raises(DataError):  # another grid, so that it is not the run of before
        predicted(run, "new/inputs/*_T1.nii.gz")
    assert read_csv(first / "predictions.csv")[0]["file"].endswith("0_T1.nii.gz")


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_a_grid_of_ranks_labels_as_one_process(job: Job) -> None:
    for number in range(5):
        write_scan(Path("data"), f"scan{number}", number)
    trained = job(*TRAINING, *TURNED, "trainer.max_epochs=1")
    Path("data/inputs/broken.nii.gz").write_text("junk")
    settings = ("input=data/inputs", "task.probabilities=true", "task.gallery=0", "hardware=cores")
    grid, alone = (
        job("task=predict", f"checkpoint={trained}", *settings, *how)
        for how in (
            ("parallel=spatial", "parallel.devices=2"),
            ("parallel=single", "parallel.devices=1"),
        )
    )
    assert read_json(grid / "result.json")["unreadable_files"] == 1
    files = [file.relative_to(alone) for file in alone.glob("*/*.nii.gz")]
    assert len(files) == 10
    for file in files:
        ours, theirs = (nibabel.load(place / file) for place in (grid, alone))
        found, expected = (np.asarray(each.dataobj) for each in (ours, theirs))
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_a_grid_of_ranks_scores_cases_as_one_process(job: Job) -> None:
    for number in range(5):
        write_scan(Path("data"), f"scan{number}", number)
    trained = job(*TRAINING, "data.source.spacing=[1.2,1.2,1.2]", "trainer.max_epochs=1")
    expected = read_csv(trained / "cases.csv")
    how = ("parallel=spatial", "parallel.devices=2", "hardware=cores")
    grid = job("task=evaluate", f"checkpoint={trained}", *how)
    for ours, theirs in zip(read_csv(grid / "cases.csv"), expected, strict=True):
        assert (ours["file"], ours["class"]) == (theirs["file"], theirs["class"])
        for name in ("mean_dice", "dice", "iou", "surface_mm"):
            assert float(ours[name] or "nan") == pytest.approx(
                float(theirs[name] or "nan"), abs=1e-9, nan_ok=True
            )
    assert {each.name for each in grid.glob("cases/*")} == {
        each.name for each in trained.glob("cases/*")
    }


def on_grid(rank: int, folder: Path, grid: Sequence[int]) -> None:
    words = ("data=volumes", "data.labels=voxel", "model=unet3d", "hardware=cores")
    shared = (f"parallel.grid={[*grid]}", "parallel=spatial", "parallel.devices=2")
    spec = composed(*words, *shared, "trainer.precision=64-true")
    from sparsepipe.config.build import build_inventory
    from sparsepipe.runs.rundir import RunDir

    run = ResolvedRun.of(spec, build_inventory(spec), directory=RunDir(folder / "run"))
    compute_on_grid(run, network(), folder)


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    settings: dict[str, Any] = {"num_classes": 3, "levels": 2, "width": 0.25}
    return unet3d(**settings).eval()


@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_logits_of_a_grid_equal_those_of_one_process(tmp_path: Path, grid: Sequence[int]) -> None:
    values = np.random.default_rng(0).standard_normal((13, 10, 15)).astype(np.float32)
    np.save(tmp_path / "scan.npy", values)
    model = VolumeModel(network(), "abc", Preparation(), sizes=(14, 10, 10), precision="64-true")
    volume = model.read([tmp_path / "scan.npy"], tmp_path)
    expected = model.logits(volume, overlap=0.5, flips=False)
    assert expected.dtype == np.float64
    run_shared(on_grid, 2, tmp_path, grid)
    found = np.load(tmp_path / "shards.npy")[0]
    assert np.abs(found - expected).max() < 1e-10
