"""Generated sets of shapes: interrupted, continued, on full disks, with other settings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.formats.off import read_off, write_off
from sparsepipe.data.shapes import SHAPE_CLASSES, generate_shapes, make_shape
from sparsepipe.errors import ConfigError, DataError
from tests.support.data_helpers import assert_session_ends

SMALL = {"classes": ["mug", "chair"], "train_per_class": 4, "test_per_class": 3, "seed": 7}


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*.off"))}


def test_layout_is_modelnets_and_files_are_readable(tmp_path: Path) -> None:
    generate_shapes(tmp_path, **SMALL)
    expected = {
        f"{name}/{split}/{name}_{number:04d}.off"
        for name in ("mug", "chair")
        for split, count in (("train", 4), ("test", 3))
        for number in range(1, count + 1)
    }
    made = contents(tmp_path)
    assert set(made) == expected
    assert len(set(made.values())) == len(expected)  # no two shapes are the same
    for name in made:
        assert read_off(tmp_path / name).area > 0


def test_a_shape_does_not_depend_on_the_rest_of_the_set(tmp_path: Path) -> None:
    generate_shapes(tmp_path / "a", **SMALL)
    generate_shapes(tmp_path / "b", classes=["mug"], train_per_class=6, test_per_class=1, seed=7)
    generate_shapes(tmp_path / "c", **{**SMALL, "seed": 8})
    small, large, other = (contents(tmp_path / name) for name in "abc")
    common = set(small) & set(large)
    assert len(common) == 5
    assert all(small[name] == large[name] for name in common)
    assert all(small[name] != other[name] for name in small)


def test_a_rerun_keeps_files_and_makes_missing_ones_anew(tmp_path: Path) -> None:
    generate_shapes(tmp_path, **SMALL)
    before = contents(tmp_path)
    kept, lost, cut = (tmp_path / f"mug/train/mug_000{i}.off" for i in (1, 2, 3))
    os.utime(kept, (1, 1))
    lost.unlink()
    cut.write_bytes(b"")  # what a power failure may leave
    (tmp_path / "mug/train/.mug_0002.off.123.tmp").write_text("OFF\n3 ")
    generate_shapes(tmp_path, **SMALL)
    assert contents(tmp_path) == before
    assert kept.stat().st_mtime == 1


@pytest.mark.parametrize("change", [{"seed": 8}, {"train_per_class": 5}, {"classes": ["mug"]}])
def test_a_folder_of_other_settings_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    generate_shapes(tmp_path, **SMALL)
    before = contents(tmp_path)
    with pytest.raises(DataError, match="other settings") as caught:
        generate_shapes(tmp_path, **{**SMALL, **change})
    assert str(tmp_path) in caught.value.remedy
    assert contents(tmp_path) == before


def test_other_data_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bathtub").mkdir()
    (tmp_path / ".lock").touch()
    with pytest.raises(DataError, match="holds other data"):
        generate_shapes(tmp_path, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "bathtub"]


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    for change, fault in (
        ({"classes": ["spoon", "mug"]}, "spoon"),
        ({"classes": []}, "none"),
        ({"seed": -1}, "seed=-1"),
        ({"test_per_class": -1}, "test_per_class=-1"),
    ):
        with pytest.raises(ConfigError, match=fault):
            generate_shapes(tmp_path / "none", **{**SMALL, **change})
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_explained_and_what_is_written_kept(
    tmp_path: Path, small_disk: Path
) -> None:
    filler = small_disk / "somebody-elses"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - 128 * 1024)  # room for a few shapes
    many = {**SMALL, "train_per_class": 40}
    with pytest.raises(DataError, match="No space left") as caught:
        generate_shapes(small_disk / "shapes", **many)
    assert "data.root" in caught.value.remedy
    before = contents(small_disk / "shapes")
    assert 0 < len(before) < 86
    filler.unlink()
    generate_shapes(small_disk / "shapes", **many)
    generate_shapes(tmp_path / "whole", **many)
    assert contents(small_disk / "shapes") == contents(tmp_path / "whole")


SCRIPT = """
import itertools, sys, time
from sparsepipe.data.shapes import generate, generate_shapes

made = itertools.count()

def make_slowly(name, rng, make=generate.make_shape):
    # However fast the machine, and however late the set is ended, it is in its middle.
    time.sleep(300 if next(made) == 100 else 0.002)
    return make(name, rng)

generate.make_shape = make_slowly
generate._SHAPES_PER_WORKER = 1
if __name__ == "__main__":
    generate_shapes(
        sys.argv[1], train_per_class=60, test_per_class=10, seed=0, workers=2
    )
"""


@pytest.mark.full
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_ends_and_leaves_whole_files(
    tmp_path: Path, kill: signal.Signals
) -> None:
    script, root = tmp_path / "make.py", tmp_path / "shapes"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(root)], stderr=subprocess.PIPE, start_new_session=True
    )
    deadline_s = time.monotonic() + 120
    while not any(root.rglob("*.off")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    if kill is signal.SIGINT:
        os.killpg(process.pid, kill)  # as a terminal does
    else:
        process.kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert_session_ends(process.pid)  # orphans of a killed parent, too
    made = sorted(root.rglob("*.off"))
    assert 0 < len(made) < 70 * len(SHAPE_CLASSES)
    before = contents(root)
    generate_shapes(root, train_per_class=60, test_per_class=10, seed=0)
    after = contents(root)
    assert len(after) == 70 * len(SHAPE_CLASSES)
    assert before.items() <= after.items()  # what was there was whole
    rng = np.random.default_rng([0, zlib.crc32(b"vase"), 1, 10])
    write_off(make_shape("vase", rng), tmp_path / "vase.off")
    assert after["vase/test/vase_0010.off"] == (tmp_path / "vase.off").read_bytes()
