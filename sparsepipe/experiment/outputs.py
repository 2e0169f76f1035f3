"""Errors of the place where results go, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsepipe.errors import SparsePipeError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names ``path`` and the remedy when the block cannot write there.

    Raises:
        SparsePipeError: no permission, no space, or no directory.
    """
    try:
        yield
    except OSError as error:
        raise SparsePipeError(
            f"{path} cannot be written: {error.strerror or error}",
            remedy="free space and check permissions there, or set paths.outputs to another "
            "directory",
        ) from error
