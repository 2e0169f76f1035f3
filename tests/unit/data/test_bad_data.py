"""Bad data and settings as users meet them: exit code, message and remedy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.errors import DataError
from tests.support.data_commands import start, tiny

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


def broken_tree(good: Path, name: str, text: str) -> Path:
    root = good.with_name(name)
    shutil.copytree(good, root)
    (root / "box" / "train" / "box_0000.off").write_text(text)
    return root


Case = tuple[list[str], int, str, str]


def cases(good: Path, disk: Path | None) -> dict[str, Case]:
    """For each fault the overrides, the exit code, and a part of the message and remedy."""
    place = good.parent / "place"
    data = DataError.exit_code
    empty, absent = good.with_name("empty"), good.with_name("absent")
    for root in (empty, absent):
        shutil.copytree(good, root)
        shutil.rmtree(root / "rod" / "train")
    (empty / "rod" / "train").mkdir()
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
        "empty class folder": (
            tiny(empty, place),
            data,
            "no train files of class rod",
            "put two or",
        ),
        "absent class folder": (
            tiny(absent, place),
            data,
            "no train files of class rod",
            "put two or",
        ),
        "another layout": (
            ["data=modelnet40_points", f"data.root={good}", f"paths.data={place}"],
            data,
            "should hold train.npz",
            "set data.root to",
        ),
        "truncated": ([*tiny(truncated, place), "data.strict=true"], data, named, lenient),
        "not a number": ([*tiny(nan, place), "data.strict=true"], data, named, lenient),
        "zero area": ([*tiny(flat, place), "data.strict=true"], data, named, lenient),
    }
    file = good.with_name("file")
    file.touch()
    found["cache in a file"] = (
        [*tiny(good, place), f"data.cache_dir={file}/cache"],
        data,
        f"cannot use {file}/cache: Not a directory",
        "set data.cache_dir to a directory",
    )
    found["shapes in a file"] = (
        ["data=shapes", f"data.root={file}/shapes", f"paths.data={place}"],
        data,
        f"cannot use {file}/shapes",
        "set data.root to a directory",
    )
    found["cache where nothing can be made"] = (
        [*tiny(good, place), "data.cache_dir=/proc/sparsepipe"],
        data,
        "cannot use /proc/sparsepipe",
        "set data.cache_dir to a directory",
    )
    if disk is not None:
        found["full disk"] = (
            [*tiny(good, place), f"data.cache_dir={disk}", "data.cached_points=131072"],
            data,
            "MiB more, but",
            "set data.cache_dir to a larger disk",
        )
    return found


@pytest.mark.full
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


@pytest.mark.full
def test_corrupt_files_are_listed_and_the_run_goes_on(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(4)
    faults = {
        "ball_0001": "OFF\n8 12 0\n0 0 0\n1 1 1\n",
        "box_0002": "OFF\n3 1 0\n0 0 nan\n1 0 0\n0 1 0\n3 0 1 2\n",
        "rod_0003": "OFF\n3 1 0\n0 0 0\n1 0 0\n2 0 0\n3 0 1 2\n",
    }
    for name, text in faults.items():
        (root / name.split("_")[0] / "train" / f"{name}.off").write_text(text)
    process = start(tiny(root, tmp_path), tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (Path(output.splitlines()[-1]) / "DONE.json").is_file()
    assert "3 of 12 train files are corrupt and left out" in errors
    for name, fault in zip(faults, ("truncated", "not finite", "zero area"), strict=True):
        line = next(line for line in errors.splitlines() if f"train/{name}.off: " in line)
        assert fault in line
