"""What a tree of files holds, without reading again what has not changed.

A manifest in the cache keeps, for each file, its size, time of change and digest. A file
whose size and time are as before is taken to hold the same bytes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.data.files import digest_file, digest_values, explaining_storage, unreadable
from sparsepipe.data.progress import progress
from sparsepipe.utils.files import write_plain_json
from sparsepipe.utils.host import usable_cores

_SAVE_EVERY_S = 5.0

_DIGEST = re.compile(r"[0-9a-f]{32}")

_Entry = list[int | str]
"""Size in bytes, time of change in nanoseconds, digest."""

_MISSING: _Entry = [-1, 0]


@dataclass(frozen=True, slots=True)
class ShapeFile:
    """One file of a shape.

    Attributes:
        name: path relative to the root, with forward slashes.
        path: where it lies.
        size_bytes: its size; -1 when there is no such file.
        digest: hex digest of its bytes, or ``missing``.
    """

    name: str
    path: Path
    size_bytes: int
    digest: str


def scan_files(root: Path, names: Sequence[str], *, cache_directory: Path) -> list[ShapeFile]:
    """Sizes and digests of files under ``root``, in the order of ``names``.

    An interrupted scan goes on where it stopped.

    Raises:
        DataError: a file is there but cannot be read, or the manifest cannot be written.
    """
    path = cache_directory / "manifests" / f"{digest_values(str(root))}.json"
    known = _read_manifest(path)
    stats = {name: _stat(root / name) for name in names}
    missing = {name for name in names if stats[name] == _MISSING}
    stale = [
        name for name in names if name not in missing and known.get(name, [])[:2] != stats[name]
    ]
    saved_s = time.monotonic()
    if stale:
        with explaining_storage(cache_directory, setting="data.cache_dir"):
            try:
                for name, digest in _digests(root, stale):
                    known[name] = [*stats[name], digest]
                    if time.monotonic() - saved_s > _SAVE_EVERY_S:
                        write_plain_json(path, known)
                        saved_s = time.monotonic()
            finally:
                write_plain_json(path, known)
    found = {name: [*_MISSING, "missing"] if name in missing else known[name] for name in names}
    return [
        ShapeFile(name, root / name, int(size_bytes), str(digest))
        for name, (size_bytes, _, digest) in found.items()
    ]


def digest_listing(files: Sequence[ShapeFile]) -> str:
    """Digest of names, sizes and contents."""
    return digest_values([[file.name, file.size_bytes, file.digest] for file in files])


def _read_manifest(path: Path) -> dict[str, _Entry]:
    """The entries that can be trusted; a file that has none is read again."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {
        name: entry
        for name, entry in entries.items()
        if isinstance(entry, list) and len(entry) == 3 and _DIGEST.fullmatch(str(entry[2]))
    }


def _stat(path: Path) -> _Entry:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return _MISSING
    except OSError as error:
        raise unreadable(path, error) from error
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
        raise unreadable(path, error) from error
