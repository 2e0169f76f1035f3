"""Reading files that users give: regular ones of a limited size.

What is wrong with a file is an ``OSError`` or a ``ValueError`` here; :func:`explained` makes an
error of it that names the file and the remedy. Errors of values name their place in the file.
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
"""No amount in a file may be larger: sums and products of a few of them are finite, and 1e18 bytes
or seconds are more than anybody has."""
_TEXT_BYTES = 64 << 20
shown = reprlib.repr
"""A value in a message, however long it is."""
_TOO_DEEP = "it is nested too deeply"


@contextmanager
def explained(
    path: Path, what: str, *, error: type[SparsePipeError], remedy: str
) -> Iterator[None]:
    """Names the file where the block cannot read it.

    Args:
        path: the file.
        what: it should be, such as "profile".
        error: that is raised for errors of the file system and of values; those of SparsePipe keep
            their type and their remedy.
        remedy: of other errors.
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
        raise error(f"{path} is no {what}: {problem}", remedy=remedy) from problem


def check_regular(path: Path, *, limit_bytes: int | None = None) -> None:
    """Raises an OSError unless a path leads to a regular file of at most ``limit_bytes``.

    To read a pipe might wait for ever, and a device never ends.
    """
    status, mode = path.stat(), path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "pipe" if stat.S_ISFIFO(mode) else "device or socket"
        kind = "directory" if stat.S_ISDIR(mode) else kind
        raise OSError(None, f"it is a {kind}, not a regular file")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise OSError(
            None,
            f"it has {status.st_size / 2**20:,.1f} MiB, more than the "
            f"{limit_bytes / 2**20:,.0f} MiB that such a file may have",
        )


def read_text(path: str | os.PathLike[str], *, limit_bytes: int = _TEXT_BYTES) -> str:
    """The text of a regular file in UTF-8, without the mark that some editors begin it with.

    Raises an OSError or a ValueError where it is no such file.
    """
    check_regular(Path(path), limit_bytes=limit_bytes)
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not a text in UTF-8 (at byte {error.start:,})") from error


def parse_json(text: str) -> Any:
    """The value of a text in JSON; raises a ValueError that names the line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not valid JSON: {error.msg} ({place})") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_yaml(text: str) -> Any:
    """The value of a text in YAML; raises a ValueError that names the line."""
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
    """A number from 0 to :data:`LARGEST`. Raises a ValueError for other values."""
    if not is_amount(value):
        raise ValueError(f"{place} is {shown(value)}, not a number from 0 to {LARGEST:g}")
    return float(value)


def whole(value: Any, place: str) -> int:
    """A whole number from 0 to :data:`LARGEST`. Raises a ValueError for other values."""
    if not (is_amount(value) and isinstance(value, int)):
        raise ValueError(f"{place} is {shown(value)}, not a whole number from 0 on")
    return value


def name(value: Any, place: str) -> str:
    """A text that can be written to files. Raises a ValueError for other values."""
    if not isinstance(value, str):
        raise ValueError(f"{place} is {shown(value)}, not a text: put it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} is {shown(value)}, which has half a character") from None
    return value


def listing(value: Any, place: str) -> list[Any]:
    """A list. Raises a ValueError for other values."""
    if not isinstance(value, list):
        raise ValueError(f"{place} is {shown(value)}, not a list")
    return value


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """A mapping with names as keys. Raises a ValueError for other values."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is {shown(value)}, not a mapping")
    for key in value:
        name(key, f"a key of {place}")
    return value
