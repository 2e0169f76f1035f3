"""Bad data and settings as users meet them: exit code, message, remedy, and a rerun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparsepipe.errors import ConfigError, DataError

MANY = """
import contextlib, io, json, sys
from sparsepipe.cli import main

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        sys.argv[1:] = arguments
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code
        print(json.dumps([code, said.getvalue()]))
"""


def tiny(root: Path, place: Path) -> list[str]:
    """A run that would take seconds if the data were good."""
    return [
        "data=modelnet10",
        f"data.root={root}",
        f"paths.data={place / 'data'}",
        f"paths.outputs={place / 'outputs'}",
        "data.cached_points=512",
        "data.num_points=256",
        "data.resolution=8",
        "data.batch_size=4",
        "data.cache_workers=1",
        "model=sparse_vgg11_bn",
        "model.width=0.05",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=2",
        "trainer.limit_test_batches=1",
    ]


def broken_tree(good: Path, name: str, text: str) -> Path:
    root = good.with_name(name)
    shutil.copytree(good, root)
    (root / "box" / "train" / "box_0000.off").write_text(text)
    return root


Case = tuple[list[str], int, str, str]


def cases(good: Path, disk: Path | None) -> dict[str, Case]:
    """For each fault the overrides, the exit code, and a part of the message and remedy."""
    place = good.parent / "place"
    data, config = DataError.exit_code, ConfigError.exit_code
    empty = good.with_name("empty")
    shutil.copytree(good, empty)
    shutil.rmtree(empty / "rod" / "train")
    truncated = broken_tree(good, "truncated", "OFF\n8 12 0\n0 0 0\n1 1 1\n")
    nan = broken_tree(good, "nan", "OFF\n3 1 0\n0 0 nan\n1 0 0\n0 1 0\n3 0 1 2\n")
    flat = broken_tree(good, "flat", "OFF\n3 1 0\n0 0 0\n1 0 0\n2 0 0\n3 0 1 2\n")
    named, lenient = "box/train/box_0000.off", "data.strict=false"
    found: dict[str, Case] = {
        "missing root": (
            tiny(good / "nowhere", place),
            data,
            "is not a directory",
            "https://modelnet.cs.princeton.edu",
        ),
        "empty class folder": (tiny(empty, place), data, "no train mesh of class rod", "put OFF"),
        "another layout": (
            ["data=modelnet40_points", f"data.root={good}", f"paths.data={place}"],
            data,
            "should hold train.npz",
            "use data=modelnet10",
        ),
        "truncated": ([*tiny(truncated, place), "data.strict=true"], data, named, lenient),
        "not a number": ([*tiny(nan, place), "data.strict=true"], data, named, lenient),
        "zero area": ([*tiny(flat, place), "data.strict=true"], data, named, lenient),
        "resolution 0": (
            [*tiny(good, place), "data.resolution=0"],
            config,
            "data.resolution=0",
            "from 1 to 2097152",
        ),
        "beyond the coordinates": (
            [*tiny(good, place), "data.resolution=2097153"],
            config,
            "data.resolution=2097153",
            "from 1 to 2097152",
        ),
        "no points": (
            [*tiny(good, place), "data.point_ratio=0"],
            config,
            "data.point_ratio=0",
            "(0, 1]",
        ),
        "too many points": (
            [*tiny(good, place), "data.point_ratio=1.01"],
            config,
            "data.point_ratio=1.01",
            "(0, 1]",
        ),
    }
    if disk is not None:
        found["full disk"] = (
            [*tiny(good, place), f"data.cache_dir={disk}", "data.cached_points=65536"],
            data,
            "MiB more, but",
            "set data.cache_dir to a larger disk",
        )
    return found


def test_each_fault_ends_with_its_code_message_and_remedy(
    make_tree: Callable[..., Path], small_disk_or_none: Path | None, tmp_path: Path
) -> None:
    faults = cases(make_tree(2), small_disk_or_none)
    arguments = [overrides for overrides, *_ in faults.values()]
    ended = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    outcomes = [json.loads(line) for line in ended.stdout.splitlines()]
    for (fault, (_, code, message, remedy)), outcome in zip(faults.items(), outcomes, strict=True):
        assert outcome[0] == code, (fault, outcome)
        said, _, advice = outcome[1].partition("remedy:")
        assert message in said, (fault, outcome)
        assert remedy in advice, (fault, outcome)
        assert "Traceback" not in outcome[1], (fault, outcome)


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sparsepipe", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def marked_rows(place: Path) -> int:
    states = place.glob("data/cache/points/*/state.npy")
    return sum(int((np.load(state) != 0).sum()) for state in states)


def test_a_run_killed_and_interrupted_while_caching_goes_on(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = tiny(make_tree(110, test_per_class=2), tmp_path)
    marked = 0
    for ending in (signal.SIGKILL, signal.SIGINT):
        process = start(arguments, tmp_path)
        deadline_s = time.monotonic() + 90
        while marked_rows(tmp_path) <= marked and time.monotonic() < deadline_s:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
        process.send_signal(ending)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (130 if ending == signal.SIGINT else -ending), errors
        assert marked < marked_rows(tmp_path) < 330
        marked = marked_rows(tmp_path)
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    process = start(arguments, tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (Path(output.splitlines()[-1]) / "DONE.json").is_file()
    assert marked_rows(tmp_path) == 336
