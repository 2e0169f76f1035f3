"""The place where results go: its path as users write it, its errors in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsepipe.errors import OutputError


def expanded(path: str) -> Path:
    """The path that is meant, with ``~`` and environment variables filled in."""
    return Path(os.path.expandvars(path)).expanduser()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names ``path`` and the remedy when the block cannot write there.

    Raises:
        OutputError: no permission, no space, or no directory.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}",
            remedy="free space and check permissions there, or set paths.outputs to another "
            "directory",
        ) from error
