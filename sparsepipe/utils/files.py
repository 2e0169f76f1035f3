"""Files that appear whole or not at all.

What is written goes to a temporary neighbour, onto the disk, and by renaming over the target,
so that a reader, or a run that was killed, meets either the old content or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well.

    When the block raises, ``path`` is left as it was and no temporary file remains. What the
    disk refuses is the caller's to explain.

    Args:
        path: the file; its folder is made if it is missing.
        durable: have the bytes on the disk first, so that a power failure leaves the file
            whole or absent, not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):  # the reason why the block failed matters more
            temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Write plain values as JSON, whole or not at all."""
    text = json.dumps(values, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="ascii")
