"""Images of digits: drawn, and read from the files of MNIST."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsepipe.data import DrawnDigits, ImageDataModule, Mnist
from sparsepipe.data.images.drawn_digits import draw
from sparsepipe.errors import ConfigError, DataError

HEAD = "label," + ",".join(f"pixel{number}" for number in range(784))


def drawn(tmp_path: Path, **settings: Any) -> ImageDataModule:
    def source(root: Any) -> DrawnDigits:
        return DrawnDigits(root, **{"train_images": 250, "test_images": 30, **settings})

    data = ImageDataModule(source=source, cache_dir=tmp_path, batch_size=20, num_workers=0)
    data.prepare_data()
    data.setup("fit")
    return data


def test_drawn_digits_are_the_same_each_time(tmp_path: Path) -> None:
    one, again = drawn(tmp_path / "a"), drawn(tmp_path / "b")
    assert one.fingerprint() == again.fingerprint()
    for split in ("train", "test"):
        images = one.samples(split).images.array
        assert images.dtype == np.uint8
        assert images.shape[1:] == (28, 28)
        assert np.array_equal(images, again.samples(split).images.array)
    other = drawn(tmp_path / "c", seed=1)
    assert other.fingerprint() != one.fingerprint()
    assert not np.array_equal(
        other.samples("train").images.array, one.samples("train").images.array
    )


def test_an_image_does_not_depend_on_how_many_follow(tmp_path: Path) -> None:
    few, many = (
        DrawnDigits(train_images=count).load("train", tmp_path).images.array for count in (130, 270)
    )
    assert np.array_equal(many[:130], few)


def test_every_image_is_in_another_hand() -> None:
    labels = np.arange(6)
    all_six = draw(labels, np.random.default_rng(3), side=28)
    assert len({image.tobytes() for image in all_six}) == 6
    assert all(0 < (image > 128).mean() < 0.5 for image in all_six), "ink, and paper around it"


def test_batches_have_every_image_once_and_the_same_order_for_a_seed(tmp_path: Path) -> None:
    data = drawn(tmp_path)
    batches = list(data.train_dataloader())
    assert batches[0]["input"].shape == (20, 1, 28, 28)
    assert batches[0]["input"].dtype == torch.float32
    assert batches[0]["input"].min() >= 0
    assert batches[0]["input"].max() <= 1
    seen = torch.cat([batch["index"] for batch in batches])
    assert sorted(seen.tolist()) == list(range(250))
    assert torch.equal(seen, torch.cat([b["index"] for b in drawn(tmp_path).train_dataloader()]))
    assert torch.equal(torch.cat([b["label"] for b in batches]), seen % 10)
    assert next(iter(data.test_dataloader()))["index"].tolist() == list(range(20))


def test_classes_can_be_learned(tmp_path: Path) -> None:
    """The nearest of 1,000 images is of the same digit for most: by chance it were a tenth."""
    data = drawn(tmp_path, train_images=1000, test_images=200)
    sets = [data.samples("train"), data.samples("test")]
    train, test = (each.images.array.reshape(-1, 784).astype(np.float32) for each in sets)
    apart = (train**2).sum(1) - 2 * test @ train.T
    right = sets[0].labels_S[apart.argmin(axis=1)] == sets[1].labels_S
    assert right.mean() > 0.9


def idx(values: np.ndarray) -> bytes:
    shape = b"".join(int(size).to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + shape + values.astype(np.uint8).tobytes()


def write_idx(root: Path, *, count: int = 12, packed: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (count, 28, 28))
    files = {
        "train-images-idx3-ubyte": images,
        "train-labels-idx1-ubyte": np.arange(count) % 10,
        "t10k-images-idx3-ubyte": images[:4],
        "t10k-labels-idx1-ubyte": np.arange(4),
    }
    root.mkdir(exist_ok=True)
    for name, values in files.items():
        raw = idx(values)
        path = root / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(raw) if packed else raw)
    return files


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path: Path, packed: bool) -> None:
    files = write_idx(tmp_path, packed=packed)
    source = Mnist(tmp_path)
    train, test = source.load("train", tmp_path), source.load("test", tmp_path)
    assert np.array_equal(train.images, files["train-images-idx3-ubyte"])
    assert train.labels_S.tolist() == files["train-labels-idx1-ubyte"].tolist()
    assert len(test.labels_S) == 4
    assert train.image(3).shape == (1, 28, 28)
    assert train.image(3).max() <= 1
    assert len(Mnist(tmp_path, train_images=7).load("train", tmp_path).labels_S) == 7
    write_idx(tmp_path / "elsewhere", packed=packed)
    assert Mnist(tmp_path / "elsewhere").fingerprint() == source.fingerprint()


def write_csv(root: Path, rows: list[list[int]]) -> None:
    text = [HEAD, *(",".join(map(str, row)) for row in rows)]
    (root / "train.csv").write_text("\n".join(text) + "\n")


def test_the_csv_of_kaggle_and_rows_that_are_held_out(tmp_path: Path) -> None:
    rows = [[number % 10, *np.arange(784) % 200] for number in range(6)]
    write_csv(tmp_path, rows)
    whole = Mnist(tmp_path)
    images = whole.load("train", tmp_path)
    assert (images.images.dtype, images.labels_S.dtype) == (np.uint8, np.int64)
    assert np.array_equal(images.images[2].ravel(), rows[2][1:])
    assert images.labels_S.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(whole.load("test", tmp_path).labels_S) == 0
    part = Mnist(tmp_path, held_out=2)
    assert part.load("train", tmp_path).labels_S.tolist() == [0, 1, 2, 3]
    assert part.load("test", tmp_path).labels_S.tolist() == [4, 5]
    with pytest.raises(DataError, match="has 6 rows"):
        Mnist(tmp_path, held_out=6).load("train", tmp_path)


def test_without_images_to_test_on_a_test_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path, [[1, *([0] * 784)]] * 3)
    data = ImageDataModule(tmp_path, source=Mnist, cache_dir=tmp_path, num_workers=0)
    data.setup("fit")
    with pytest.raises(ConfigError, match="no samples to test on") as error:
        data.test_dataloader()
    assert "held_out" in error.value.remedy


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda root: (root / "t10k-labels-idx1-ubyte").unlink(), "is not a directory that holds"),
        (lambda root: _cut(root / "train-images-idx3-ubyte"), "train images"),
        (lambda root: (root / "train-labels-idx1-ubyte").write_bytes(b"no"), "train-labels-idx1"),
        (lambda root: (root / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(5))), "12 imag"),
        (lambda root: _cut(root / "packed" / "train-images-idx3-ubyte.gz"), "train images"),
        (lambda root: write_csv(root / "csv", [[1, 2, 3]]), "train images"),
        (lambda root: write_csv(root / "csv", [[11, *([0] * 784)]]), "from 0 to 9"),
        (lambda root: write_csv(root / "csv", [[1, *([256] * 784)]]), "255"),
    ],
)
def test_what_is_missing_or_broken_is_named(tmp_path: Path, spoil: Any, named: str) -> None:
    write_idx(tmp_path)
    write_idx(tmp_path / "packed", packed=True)
    (tmp_path / "csv").mkdir()
    write_csv(tmp_path / "csv", [[1, *([0] * 784)]])

    def read() -> None:
        for root in (tmp_path, tmp_path / "packed", tmp_path / "csv"):
            Mnist(root).load("train", tmp_path)

    read()
    spoil(tmp_path)
    with pytest.raises(DataError, match=named) as error:
        read()
    assert str(tmp_path) in error.value.message
    assert error.value.remedy


@pytest.mark.parametrize("settings", [{"held_out": 2}, {"train_images": 13}, {"train_images": 0}])
def test_settings_that_are_refused_are_named(tmp_path: Path, settings: dict[str, int]) -> None:
    write_idx(tmp_path)
    with pytest.raises(ConfigError, match=next(iter(settings))) as error:
        Mnist(tmp_path, **settings).load("train", tmp_path)  # type: ignore[arg-type]
    assert error.value.remedy
