"""Files of users that are not regular, not a text, too large or nested too deeply."""

import os
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils import reading


def test_special_files_are_refused_without_being_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            reading.read_text(path)


def test_a_text_may_begin_with_a_mark_and_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert reading.parse_json(reading.read_text(path)) == [1]
    with pytest.raises(OSError, match="above the limit"):
        reading.read_text(path, limit_bytes=5)
    path.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="at byte 2"):
        reading.read_text(path)


@pytest.mark.parametrize("parse", [reading.parse_json, reading.parse_yaml])
@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 100_000, "too deeply"), ('{"a":' * 100_000, "too deeply"), ("[\n{]", "line 2")],
)
def test_structures_that_no_parser_takes(parse, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_errors_name_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with (
        pytest.raises(ConfigError) as caught,
        reading.explained(path, "plan", error=ConfigError, remedy="correct it"),
    ):
        raise ValueError("stages is 7")
    assert caught.value.message == f"{path} is not a valid plan: stages is 7"
    with (
        pytest.raises(DataError) as kept,
        reading.explained(path, "plan", error=ConfigError, remedy="correct it"),
    ):
        raise DataError(f"{path} is cut off", remedy="copy it again")
    assert (kept.value.message, kept.value.remedy) == (f"{path} is cut off", "copy it again")
