"""Generated signals, images and volumes: their content, their cache, and reading of parts."""

from __future__ import annotations

import functools
import math
import multiprocessing
import resource
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn
from torch.nn import functional as F

from sparsepipe.config.build import build_data
from sparsepipe.config.compose import config_dir, resolve
from sparsepipe.data import GeneratedVolumes, VolumeDataModule, VolumeFiles
from sparsepipe.data.volumes import generated
from sparsepipe.data.volumes.drawing import TEXTURES, draw_labels, draw_objects
from sparsepipe.errors import ConfigError
from sparsepipe.utils.process import give_freed_memory_back
from tests.support.processes import run


def drawn(
    cache: Path, sizes: Sequence[int], *, labels: str = "voxel", **settings: Any
) -> VolumeDataModule:
    counts = {"train_samples": 8, "test_samples": 4, **settings}
    data = VolumeDataModule(
        source=functools.partial(GeneratedVolumes, sizes=sizes, **counts),
        cache_dir=cache,
        labels=labels,  # type: ignore[arg-type]
        num_workers=0,
    )
    data.prepare_data()
    data.setup("fit")
    return data


SIZES = ([200], [24, 31], [12, 9, 17])


@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_batches_of_each_dimension(tmp_path: Path, sizes: list[int]) -> None:
    data = drawn(tmp_path, sizes, channels=2)
    batch = next(iter(data.train_dataloader()))
    assert batch["input"].shape == (4, 2, *sizes)
    assert batch["input"].dtype == torch.float32
    assert batch["label"].shape == (4, *sizes)
    assert batch["label"].dtype == torch.int64
    assert not torch.equal(batch["input"][:, 0], batch["input"][:, 1]), "each in its own light"
    assert data.classes == ("background", *TEXTURES)
    assert data.num_classes == 5
    assert data.sample_sizes == tuple(sizes)

    of_samples = drawn(tmp_path, sizes, channels=2, labels="sample")
    batches = list(of_samples.train_dataloader())
    label, index = (torch.cat([each[name] for each in batches]) for name in ("label", "index"))
    assert sorted(index.tolist()) == list(range(8))
    assert torch.equal(label, index % 4)
    assert of_samples.classes == TEXTURES
    assert of_samples.fingerprint() == data.fingerprint()


@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_a_part_is_that_of_the_whole(tmp_path: Path, sizes: list[int]) -> None:
    data = drawn(tmp_path, sizes)
    for loader in (data.train_dataloader(), data.test_dataloader()):
        dataset = loader.dataset
        whole = dataset[0, 3]
        assert dataset.sample_sizes == tuple(sizes)
        for shares in ((0, 0.4), (0.4, 1), (0.5, 0.5)):  # the last one is empty
            part = tuple(slice(*(int(share * size) for share in shares)) for size in sizes)
            dataset.read_part(part)
            mine = dataset[0, 3]
            assert np.array_equal(mine["input"], whole["input"][(slice(None), *part)])
            assert np.array_equal(mine["label"], whole["label"][part])
            assert mine["index"] == whole["index"]
        batch = next(iter(loader))
        assert batch["input"].shape[2:] == batch["label"].shape[1:]


@pytest.mark.parametrize(
    "part",
    [(slice(0, 4),), (slice(0, 4), slice(2, 32)), (slice(0, 4), slice(0, 4, 2))],
    ids=["a slice is missing", "beyond the sample", "a step"],
)
def test_what_is_no_part_is_refused(tmp_path: Path, part: tuple[slice, ...]) -> None:
    dataset = drawn(tmp_path, [24, 31]).train_dataloader().dataset
    with pytest.raises(ValueError, match=r"zip|is not a slice"):
        dataset.read_part(part)


def test_a_sample_depends_on_its_seed_split_and_index_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = drawn(tmp_path / "a", [12, 9, 17], channels=2)
    monkeypatch.setattr(generated, "_PIECE_VOXELS", 400)  # two rows at once
    more = drawn(tmp_path / "b", [12, 9, 17], channels=2, train_samples=9)
    images, again = (each.samples("train").inputs.array for each in (one, more))
    assert np.array_equal(again[:8], images)
    assert np.array_equal(more.samples("train").labels.array[:8], one.samples("train").labels.array)
    assert len({sample.tobytes() for sample in again}) == 9
    assert not np.array_equal(images[:4], one.samples("test").inputs.array)
    other = drawn(tmp_path / "a", [12, 9, 17], channels=2, seed=1)
    assert not np.array_equal(other.samples("train").inputs.array, images)
    assert len({each.fingerprint() for each in (one, more, other)}) == 3


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_largest_object_gives_the_label(dimensions: int) -> None:
    sizes = [math.ceil(4000 ** (1 / dimensions))] * dimensions
    for number in range(40):
        rng = np.random.default_rng([dimensions, number])
        labels = draw_labels(draw_objects(number % 4, sizes, rng), sizes, slice(0, sizes[0]))
        counts = np.bincount(labels.ravel(), minlength=5)[1:]
        assert counts.argmax() == number % 4
        assert dimensions == 1 or (labels == 0).any()


def small_network(channels: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv1d(1, 16, 9, padding=4), nn.BatchNorm1d(16), nn.ReLU()),
        *(nn.Conv1d(16, 16, 9, padding=4), nn.BatchNorm1d(16), nn.ReLU()),
        nn.Conv1d(16, channels, 1),
    )


def inputs_and_labels(data: VolumeDataModule, split: str) -> tuple[torch.Tensor, ...]:
    loader = data.train_dataloader() if split == "train" else data.test_dataloader()
    batches = list(loader)
    return tuple(torch.cat([batch[name] for batch in batches]) for name in ("input", "label"))


@pytest.mark.parametrize("labels", ["sample", "voxel"])
def test_a_small_network_learns_what_no_linear_model_of_means_does(
    tmp_path: Path, labels: str
) -> None:
    torch.manual_seed(0)
    data = drawn(tmp_path, [192], labels=labels, train_samples=320, test_samples=160)
    inputs, wanted = inputs_and_labels(data, "train")
    unseen, answers = inputs_and_labels(data, "test")
    network = small_network(data.num_classes)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)

    def logits(batch: torch.Tensor) -> torch.Tensor:
        found = network(batch)
        return found.mean(-1) if labels == "sample" else found

    for _ in range(8):
        for chosen in torch.randperm(len(inputs)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(logits(inputs[chosen]), wanted[chosen]).backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        accuracy = (logits(unseen).argmax(1) == answers).float().mean()
    assert accuracy > 0.8

    if labels == "sample":
        # Of the sample and of its eighths. By chance it were a quarter.
        def means(batch: torch.Tensor) -> torch.Tensor:
            eighths = batch.unflatten(-1, (8, -1)).flatten(1, 2)
            found = [eighths.mean(-1), batch.mean(-1), torch.ones(len(batch), 1)]
            return torch.cat(found, 1)

        fitted = torch.linalg.lstsq(means(inputs), F.one_hot(wanted).float()).solution
        linear = ((means(unseen) @ fitted).argmax(1) == answers).float().mean()
        assert linear < 0.4


def test_of_several_processes_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = GeneratedVolumes._write_samples

    def noted(self: GeneratedVolumes, split: Any, *rest: Any) -> None:
        with (tmp_path / "written").open("a") as file:
            file.write(f"{split}\n")
        write(self, split, *rest)

    monkeypatch.setattr(GeneratedVolumes, "_write_samples", noted)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=drawn, args=(tmp_path / "cache", [96, 96])) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted((tmp_path / "written").read_text().split()) == ["test", "train"]


def test_what_is_interrupted_leaves_no_sample_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = drawn(tmp_path / "whole", [16, 16]).samples("train").inputs.array
    seen: list[int] = []

    def interrupted(label: int, *rest: Any) -> Any:
        seen.append(label)
        if len(seen) == 6:
            raise KeyboardInterrupt
        return draw_objects(label, *rest)

    monkeypatch.setattr(generated, "draw_objects", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drawn(tmp_path / "cache", [16, 16])
    assert not list(tmp_path.glob("cache/**/*.npy*"))
    monkeypatch.undo()
    (folder,) = tmp_path.glob("cache/volumes/train_*")
    leftover = folder / ".inputs.npy.12345.tmp"  # of a process that was killed
    leftover.touch()
    assert np.array_equal(drawn(tmp_path / "cache", [16, 16]).samples("train").inputs.array, whole)
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sizes": [4, 0]}, "data.source.sizes"),
        ({"sizes": [4, 4, 4, 4]}, "data.source.sizes"),
        ({"channels": 0}, "channels=0"),
        ({"labels": "pixel"}, "labels=.pixel"),
    ],
)
def test_settings_are_checked(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        drawn(tmp_path, **{"sizes": [8, 8], **settings})
    assert caught.value.remedy


SIZES_64_MIB = (64, 512, 512)
QUARTER = (slice(0, 64), slice(256, 512), slice(0, 256))


def memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def within(mib: float, work: Callable[[], Any]) -> Any:
    """The result of the work; None if it needs more anonymous memory than that, in addition."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most_bytes = int((memory_mib("VmData") + mib) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, before[1]))
    try:
        return work()
    except MemoryError:
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def write_h5(path: Path, values: np.ndarray) -> None:
    with import_module("h5py").File(path, "w") as file:
        file.create_dataset("values", data=values, chunks=(16, 128, 128))


def write_zarr(path: Path, values: np.ndarray) -> None:
    array = import_module("zarr").create_array(
        path, shape=values.shape, dtype=values.dtype, chunks=(16, 128, 128)
    )
    array[:] = values


FILES: dict[str, tuple[str | None, Callable[[Path, np.ndarray], None]]] = {
    "npy": (None, np.save),
    "h5": ("h5py", write_h5),
    "zarr": ("zarr", write_zarr),
}
"""By its suffix: the package that reads a file, and what writes it."""


def write_volume(rank: int, root: Path, kind: str) -> None:
    values = np.zeros(SIZES_64_MIB, np.int16)
    values[QUARTER] = 7
    for split in ("train", "test"):
        (root / "only" / split).mkdir(parents=True)
        FILES[kind][1](root / "only" / split / f"a.{kind}", values)


def read_a_quarter(rank: int, root: Path, kind: str) -> tuple[bool, float, bool]:
    threading.stack_size(2**19)  # of zarr's threads, whose stacks would count with 8 MiB each
    source: Any = VolumeFiles
    if kind == "generated":
        source = functools.partial(GeneratedVolumes, sizes=SIZES_64_MIB, train_samples=1)
    elif (package := FILES[kind][0]) is not None:
        import_module(package)  # which takes memory for itself
    data = VolumeDataModule(root, source=source, cache_dir=root, num_workers=0, batch_size=1)
    samples = within(32, lambda: data.samples("train"))
    assert samples is not None, "opening takes more"
    loader = data._loader("val", np.arange(1))
    dataset: Any = loader.dataset

    def read() -> torch.Tensor:
        return next(iter(loader))["input"]

    dataset.read_part((slice(0, 1), slice(0, 1), slice(0, 1)))
    read()  # which starts threads of readers, and keeps what they need
    dataset.read_part(tuple(map(slice, SIZES_64_MIB)))
    fits = within(48, read) is not None
    dataset.read_part(QUARTER)
    give_freed_memory_back()  # here and below: what is free is not held
    before_mib = memory_mib("RssAnon")
    # Parts of mapped files are not copied before they are float32; zarr makes an array of chunks.
    part = within(40 if kind in ("zarr", "h5") else 24, read)
    assert part is not None, "reading a quarter takes more"
    give_freed_memory_back()
    held_mib = memory_mib("RssAnon") - before_mib
    is_right = torch.equal(part[0], torch.from_numpy(samples.read_input(0, QUARTER)))
    return fits, held_mib, is_right


@pytest.mark.parametrize("kind", ["generated", *FILES])
def test_a_rank_never_holds_the_whole_sample(tmp_path: Path, kind: str) -> None:
    """A sample of 64 MiB is written with 32 MiB of memory, and a quarter of it is read with 24.

    A quarter of a zarr array or an h5 file, which are not mapped, is read with 40. What counts is
    anonymous memory, which a
    process cannot do without. RLIMIT_DATA limits it, so that a peak above would raise MemoryError,
    as reading the whole does. Pages of mapped files are no measure: they are the kernel's cache,
    which all ranks of a host share and which it drops when memory is short; until then the resident
    size counts them.
    """
    if kind != "generated":
        if (package := FILES[kind][0]) is not None:
            pytest.importorskip(package)
        run(write_volume, 1, tmp_path, kind, join_group=False)
    # In a new process, whose heap has no room left by earlier tests.
    ((fits, held_mib, is_right),) = run(read_a_quarter, 1, tmp_path, kind)
    assert not fits, "reading the whole fits: the limit does not hold"
    assert held_mib < 20, "more than a quarter of 64 MiB is held"
    assert is_right


@pytest.mark.parametrize(("group", "dimensions"), [("signals", 1), ("images", 2), ("volumes", 3)])
def test_groups_are_of_these_dimensions(tmp_path: Path, group: str, dimensions: int) -> None:
    overrides = [f"data={group}", f"data.cache_dir={tmp_path}", "data.labels=voxel", "scale=smoke"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        spec = resolve(compose("config", overrides))
    data = build_data(spec)
    assert isinstance(data, VolumeDataModule)
    assert len(data.sample_sizes) == dimensions
    assert data.num_classes == 5
    assert not list(tmp_path.iterdir()), "nothing is generated before it is needed"
