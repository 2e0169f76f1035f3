import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsepipe.errors import DataError
from sparsepipe.utils.files import (
    atomic_writer,
    read_json,
    write_bytes_atomic,
    write_json,
    write_text_atomic,
)


def test_text_replaces_the_old_content_whole(tmp_path):
    path = tmp_path / "deep" / "note.txt"
    assert write_text_atomic(path, "a long first text") == path
    write_text_atomic(path, "größer")
    assert path.read_bytes() == "größer".encode()
    assert [p.name for p in path.parent.iterdir()] == ["note.txt"]


def test_a_failure_while_writing_leaves_the_old_file_and_no_litter(tmp_path):
    path = write_bytes_atomic(tmp_path / "x.bin", b"old")

    def write_half() -> None:
        with atomic_writer(path) as stream:
            stream.write(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


def test_full_disk_is_a_data_error_with_the_path_and_leaves_nothing(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")

    def write_to_a_full_disk() -> None:
        with atomic_writer(tmp_path / "x.bin") as stream:
            target = os.open(full, os.O_WRONLY)
            os.dup2(target, stream.fileno())
            os.close(target)
            stream.write(b"x" * 100_000)

    with pytest.raises(DataError, match=r"x\.bin.*No space left") as caught:
        write_to_a_full_disk()
    assert "free space" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_directory_is_a_data_error(tmp_path):
    write_text_atomic(tmp_path / "file", "")
    with pytest.raises(DataError, match="cannot be written"):
        write_text_atomic(tmp_path / "file" / "below", "text")


def test_files_get_the_permissions_that_open_would_give(tmp_path):
    (tmp_path / "plain").write_text("x")
    write_text_atomic(tmp_path / "ours", "x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")}
    assert len(modes) == 1


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


@pytest.mark.parametrize("content", [None, '{"half": '])
def test_missing_or_broken_json_is_a_data_error_with_its_path(tmp_path, content):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=r"x\.json"):
        read_json(tmp_path / "x.json")
