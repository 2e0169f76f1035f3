from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsepipe.errors import DataError
from sparsepipe.utils import reading
from sparsepipe.utils.files import (
    LockHeldError,
    file_lock,
    read_json,
    read_mapping,
    replacing,
    write_bytes_atomic,
    write_json,
    write_plain_json,
    write_text_atomic,
)
from tests.support.command_line import files_limited_to


def test_text_replaces_the_old_content_whole(tmp_path):
    path = tmp_path / "deep" / "note.txt"
    assert write_text_atomic(path, "a long first text") == path
    write_text_atomic(path, "größer")
    assert path.read_bytes() == "größer".encode()
    assert [p.name for p in path.parent.iterdir()] == ["note.txt"]


def test_full_disk_is_a_data_error_with_the_path_and_leaves_nothing(tmp_path):
    with files_limited_to(1000), pytest.raises(DataError, match=r"x\.bin") as caught:
        write_bytes_atomic(tmp_path / "x.bin", b"x" * 100_000)
    assert "free space" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True, slots=True)
class _Link:
    speed_bytes_per_s: float
    hosts: tuple[str, ...]


def test_json_of_everything_a_run_records(tmp_path):
    value = {
        "accuracy": np.float32(0.5),
        "exact": np.float64(0.1),
        "counts": np.arange(4).reshape(2, 2),
        "scalar": torch.tensor(3),
        "flag": np.bool_(True),
        "data": Path("a/b"),
        "classes": {"chair", "bed"},
        "link": _Link(1e9, ("a", "b")),
        "loss": float("nan"),
        "worst": np.array([np.inf, 1.0]),
        7: None,
    }
    path = write_json(tmp_path / "result.json", value)
    assert read_json(path) == {
        "accuracy": 0.5,
        "exact": 0.1,
        "counts": [[0, 1], [2, 3]],
        "scalar": 3,
        "flag": True,
        "data": "a/b",
        "classes": ["bed", "chair"],
        "link": {"speed_bytes_per_s": 1e9, "hosts": ["a", "b"]},
        "loss": None,
        "worst": [None, 1.0],
        "7": None,
    }
    assert path.read_text().endswith("}\n")
    json.loads(path.read_text(), parse_constant=pytest.fail)


def test_json_refuses_what_has_no_plain_counterpart(tmp_path):
    with pytest.raises(TypeError, match="object"):
        write_json(tmp_path / "x.json", {"a": object()})
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[1]", "its content is [1], not a mapping"),
        ("{}", "'time' is None, not a number from 0"),
        ('{"time": "noon"}', "'time' is 'noon', not a number from 0"),
    ],
)
def test_a_mapping_has_the_values_that_are_needed(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError, match=re.escape(f"{path} does not hold")) as error:
        read_mapping(path, time=reading.amount)
    assert why in error.value.message


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_appears_when_it_is_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "deep" / "file.bin"
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(b"half")
        assert not path.exists()
        temporary.write_bytes(b"whole")
    assert path.read_bytes() == b"whole"
    assert os.listdir(path.parent) == ["file.bin"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_json_of_names_that_are_no_text(tmp_path: Path) -> None:
    """Names of files may hold any bytes; Python keeps those as lone surrogates."""
    values = {"größer": [1, 2.5, None], os.fsdecode(b"\xff.off"): "x"}
    write_plain_json(tmp_path / "values.json", values)
    assert json.loads((tmp_path / "values.json").read_text()) == values


HOLDING = """
import pathlib, sys, time
from sparsepipe.utils.files import file_lock
with file_lock(pathlib.Path(sys.argv[1])):
    print(flush=True)
    time.sleep(300)
"""


def test_a_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    path, waits = tmp_path / "deep" / "lock", list[str]()
    command = [sys.executable, "-c", HOLDING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "\n"
            for wait_s in (0.0, 0.2):
                with (
                    pytest.raises(LockHeldError),
                    file_lock(path, wait_s=wait_s, on_wait=lambda: waits.append("waits")),
                ):
                    pass
        finally:
            other.send_signal(signal.SIGKILL)
    assert waits == ["waits", "waits"]
    with file_lock(path, wait_s=60, on_wait=lambda: waits.append("waits")):
        pass
    assert len(waits) == 2
    assert path.exists()
