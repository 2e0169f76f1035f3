"""Reads files that users give: regular files of a limited size.

The functions raise an ``OSError``, or a ``ValueError`` that names the ``place`` of a wrong value in
the file; :func:`explained` turns both into an error that names the file and a remedy.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

from sparsepipe.errors import SparsePipeError

LARGEST = 1e18
"""The largest amount in a file: sums and products of a few amounts stay finite, and nobody has 1e18
bytes or seconds."""
_TEXT_BYTES = 64 << 20
shown = reprlib.repr
"""Abbreviates a value for a message."""
_TOO_DEEP = "its lists or mappings are nested too deeply"


@contextmanager
def explained(
    path: Path, what: str, *, error: type[SparsePipeError], remedy: str
) -> Iterator[None]:
    """Turns errors of the block, which reads the file ``path``, into errors that name the file.

    Args:
        path: the file.
        what: what the file should be, such as "profile".
        error: type of the error raised for an OSError or ValueError; a SparsePipeError keeps its
            type and its remedy.
        remedy: remedy of that error.
    """
    try:
        yield
    except SparsePipeError as problem:
        if str(path) in problem.message:
            raise
        raise type(problem)(f"{path}: {problem.message}", remedy=problem.remedy) from problem
    except OSError as problem:
        raise error(
            f"the {what} {path} cannot be read: {problem.strerror or problem}", remedy=remedy
        ) from problem
    except ValueError as problem:
        raise error(f"{path} is not a valid {what}: {problem}", remedy=remedy) from problem


def check_regular(path: Path, *, limit_bytes: int | None = None) -> None:
    """Raises an OSError unless ``path`` is a regular file of at most ``limit_bytes``, if given.

    Reading a pipe might wait forever, and a device never ends.
    """
    status, mode = path.stat(), path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "pipe" if stat.S_ISFIFO(mode) else "device or socket"
        kind = "directory" if stat.S_ISDIR(mode) else kind
        raise OSError(None, f"it is a {kind}, not a regular file")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise OSError(
            None,
            f"its size of {status.st_size / 2**20:,.1f} MiB is above the limit of "
            f"{limit_bytes / 2**20:,.0f} MiB for such a file",
        )


def read_text(path: str | os.PathLike[str], *, limit_bytes: int = _TEXT_BYTES) -> str:
    """Reads the text of a regular file in UTF-8, without a byte order mark.

    Raises an OSError if it is missing, not regular or too large; a ValueError if not in UTF-8.
    """
    check_regular(Path(path), limit_bytes=limit_bytes)
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text in UTF-8 (at byte {error.start:,})") from error


def parse_json(text: str) -> Any:
    """Parses JSON text; raises a ValueError, with line and column for a syntax error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not valid JSON: {error.msg} ({place})") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_yaml(text: str) -> Any:
    """Parses YAML text; raises a ValueError, with line and column for a syntax error."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def is_amount(value: Any) -> bool:
    """Whether a value is a number from 0 to :data:`LARGEST`."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and 0 <= value <= LARGEST


def amount(value: Any, place: str) -> float:
    """Checks for a number from 0 to :data:`LARGEST`, returns it; a ValueError names ``place``."""
    if not is_amount(value):
        raise ValueError(f"{place} is {shown(value)}, not a number from 0 to {LARGEST:g}")
    return float(value)


def whole(value: Any, place: str) -> int:
    """Checks for an int from 0 to :data:`LARGEST`, returns it; a ValueError names ``place``."""
    if not (is_amount(value) and isinstance(value, int)):
        raise ValueError(f"{place} is {shown(value)}, not a whole number from 0 to {LARGEST:g}")
    return value


def name(value: Any, place: str) -> str:
    """Checks for text that UTF-8 can encode, returns it; a ValueError names ``place``."""
    if not isinstance(value, str):
        raise ValueError(f"{place} is {shown(value)}, not text; put names in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} is {shown(value)}, which UTF-8 cannot encode") from None
    return value


def listing(value: Any, place: str) -> list[Any]:
    """Checks for a list, returns it; a ValueError names ``place``."""
    if not isinstance(value, list):
        raise ValueError(f"{place} is {shown(value)}, not a list")
    return value


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """Checks for a mapping whose keys are text, returns it; a ValueError names ``place``."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is {shown(value)}, not a mapping")
    for key in value:
        name(key, f"a key of {place}")
    return value
