"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparsepipe.utils.files import replacing, write_plain_json


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
