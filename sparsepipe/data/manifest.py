"""What a tree of files holds, without reading again what has not changed.

A manifest in the cache keeps, for each file, its size, time of change and digest. A file
whose size and time are as before is taken to hold the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.data.files import (
    digest_file,
    digest_values,
    explaining_full_disk,
    usable_cores,
    write_json,
)
from sparsepipe.data.progress import progress

_SAVE_EVERY_S = 5.0

_Entry = list[int | str]
"""Size in bytes, time of change in nanoseconds, digest."""


@dataclass(frozen=True, slots=True)
class ShapeFile:
    """One file of a shape.

    Attributes:
        name: path relative to the root, with forward slashes.
        path: where it lies.
        size_bytes: its size; -1 when it cannot be read.
        digest: hex digest of its bytes, or why it cannot be read.
    """

    name: str
    path: Path
    size_bytes: int
    digest: str


def scan_files(root: Path, names: Sequence[str], *, cache_directory: Path) -> list[ShapeFile]:
    """Sizes and digests of files under ``root``, in the order of ``names``.

    A file that cannot be read gets the reason in place of its digest; whoever reads its
    content will report it. An interrupted scan goes on where it stopped.

    Raises:
        DataError: the manifest cannot be written because the disk is full.
    """
    path = cache_directory / "manifests" / f"{digest_values(str(root))}.json"
    known = _read_manifest(path)
    stats = {name: _stat(root / name) for name in names}
    stale = [name for name in names if known.get(name, [])[:2] != stats[name]]
    saved_s = time.monotonic()
    if stale:
        with explaining_full_disk(cache_directory):
            for name, digest in _digests(root, stale):
                known[name] = [*stats[name], digest]
                if time.monotonic() - saved_s > _SAVE_EVERY_S:
                    write_json(path, known)
                    saved_s = time.monotonic()
            write_json(path, known)
    return [
        ShapeFile(name, root / name, int(known[name][0]), str(known[name][2])) for name in names
    ]


def digest_listing(files: Sequence[ShapeFile]) -> str:
    """Digest of names, sizes and contents."""
    return digest_values([[file.name, file.size_bytes, file.digest] for file in files])


def _read_manifest(path: Path) -> dict[str, _Entry]:
    try:
        entries: dict[str, _Entry] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # none yet, or not ours: the files are read again
    return entries


def _stat(path: Path) -> _Entry:
    try:
        stat = path.stat()
    except OSError:
        return [-1, 0]
    return [stat.st_size, stat.st_mtime_ns]


def _digests(root: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Digests in the order of ``names``; hashing releases the interpreter's lock."""
    # The work is bounded by the disk, so a few more threads than cores keep it busy.
    with ThreadPoolExecutor(2 * usable_cores()) as pool, progress("reading files") as advance:
        for name, digest in zip(
            names, pool.map(lambda name: _digest(root / name), names), strict=True
        ):
            advance(len(names))
            yield name, digest


def _digest(path: Path) -> str:
    try:
        return digest_file(path)
    except OSError as error:
        return f"unreadable: {error.strerror}"
