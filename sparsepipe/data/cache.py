"""Cache of prepared data: files that are built once, and that appear only when they are complete.

A directory named after a digest of S data files and of the reader's settings holds what the reader
made of each: an array, its row of ``rows.npy`` [S, ...], K numbers in ``meta.npy`` [S, K] or, if it
is corrupt, its fault in ``corrupt.json``. ``rows.npy`` appears last: where it exists, so do the
others. After a build was interrupted or killed, the next one starts from the beginning.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import (
    LOCK_WAIT_S,
    DataFile,
    UnreadableError,
    check_regular,
    digest_listing,
    digest_values,
    explaining_storage,
    locked,
    new_array,
    unreadable,
)
from sparsepipe.data.points import IntArray, MappedArray
from sparsepipe.errors import DataError
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import replacing, write_plain_json
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.process import exit_with_parent
from sparsepipe.utils.progress import progress

_VERSION = 2
"""Increased with any change to the files of the cache."""
_SECONDS_PER_WORKER = 1.5
"""Seconds of work for a process that justify starting it."""
_SECONDS_PER_FILE = 3e-3
_BYTES_PER_S = 8e6
"""Estimated time per file and speed of reading, from which the number of workers follows."""
_PORTION_FILES = 1024
"""Largest number of files whose rows wait in memory to be written."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Settings of the cache in which a source keeps prepared data; see ``ShapeDataModule``.

    ``directory`` is called ``cache_dir`` there, ``points`` ``cached_points``, ``seed``
    ``sampling_seed``, and ``workers`` ``cache_workers``.
    """

    directory: Path
    points: Count = 16_384
    seed: Seed = 0
    strict: bool = False
    workers: CountFrom0 = 0
    lock_wait_s: float = LOCK_WAIT_S


class RowReader(Protocol):
    """Reader that computes a file's row, the array to cache; it is pickled for worker processes.

    ``kind`` names the cache's directory for these rows, ``dtype`` is their type in numpy's notation
    (such as ``<u2``), and ``meta_size`` is K, the count of further numbers for each file.
    """

    kind: ClassVar[str]
    dtype: ClassVar[str]
    meta_size: ClassVar[int]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a file's row."""
        ...

    def settings(self) -> dict[str, Any]:
        """Returns the settings and versions that, with the files' contents, determine the rows."""
        ...

    def __call__(self, path: Path, digest: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Returns a file's row and [K] numbers, given its digest; raises a DataError if corrupt."""
        ...


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Cached rows [S, ...] of S files, with zeros for corrupt files, in the cache's ``directory``.

    ``meta_SK`` holds each file's further numbers, ``usable_S`` the indices of intact files,
    ``faults`` the fault and remedy of each corrupt file by its name. ``is_new``: whether this call
    computed the rows instead of finding them in the cache.
    """

    directory: Path
    rows: MappedArray
    meta_SK: NDArray[np.float32]
    usable_S: IntArray
    faults: Mapping[str, str]
    is_new: bool


def build_once(path: Path, build: Callable[[], object], *, wait_s: float = LOCK_WAIT_S) -> bool:
    """Calls ``build`` if the cache file ``path`` is missing; returns whether ``build`` was called.

    Among several processes, one builds while the others wait.

    Raises:
        DataError: the disk is full, the directory cannot be written to, or another process has been
            building for longer than ``wait_s`` seconds.
    """
    with explaining_storage(path.parent, setting="data.cache_dir"):
        if path.is_file():
            return False
        with locked(path.parent / "lock", wait_s=wait_s):
            if path.is_file():
                return False
            build()
            return True


def cached_rows(
    files: Sequence[DataFile], reader: RowReader, settings: CacheSettings
) -> CachedRows:
    """Returns the reader's rows of ``files``, in this order; the first call computes them."""
    key = digest_values([_VERSION, reader.settings(), digest_listing(files)])
    directory = settings.directory / reader.kind / key
    path = directory / "rows.npy"
    build = partial(_build, path, files, reader, settings.workers or usable_cores())
    is_new = build_once(path, build, wait_s=settings.lock_wait_s)
    faults: Mapping[str, str] = json.loads((directory / "corrupt.json").read_text())
    return CachedRows(
        directory=directory,
        rows=MappedArray(path),
        meta_SK=np.load(directory / "meta.npy"),
        usable_S=np.flatnonzero([file.name not in faults for file in files]),
        faults=faults,
        is_new=is_new,
    )


def _build(path: Path, files: Sequence[DataFile], reader: RowReader, workers: int) -> None:
    faults = dict[str, str]()
    meta_SK = np.zeros((len(files), reader.meta_size), np.float32)
    num_bytes = sum(max(file.size_bytes, 0) for file in files)
    expected_s = len(files) * _SECONDS_PER_FILE + num_bytes / _BYTES_PER_S
    with (
        new_array(path, dtype=reader.dtype, shape=(len(files), *reader.row_shape)) as rows,
        progress(f"preparing {reader.kind}") as advance,
        parallel_map(min(workers, int(expected_s / _SECONDS_PER_WORKER)), chunk=8) as mapped,
    ):
        for start in range(0, len(files), _PORTION_FILES):
            portion = files[start : start + _PORTION_FILES]
            for index, result in enumerate(mapped(partial(_read_one, reader), portion), start):
                if isinstance(result, str):
                    faults[files[index].name] = result
                else:
                    rows[index], meta_SK[index] = result
                advance(len(files))
        with replacing(path.with_name("meta.npy")) as temporary, temporary.open("wb") as file:
            np.save(file, meta_SK)
        write_plain_json(path.with_name("corrupt.json"), faults)


def _read_one(reader: RowReader, file: DataFile) -> tuple[NDArray[Any], NDArray[np.float32]] | str:
    """Returns a file's row and further numbers or, if it is corrupt, its fault and remedy."""
    try:
        if file.size_bytes < 0:
            check_regular(file.path)
        return reader(file.path, file.digest)
    except (UnreadableError, ImportError, MemoryError):
        raise  # the file itself may be valid
    except DataError as error:
        return str(error)
    except Exception as error:  # a file that makes a library fail is corrupt too
        if isinstance(error, OSError) and error.errno:
            raise unreadable(file.path, error) from error
        fault = f"{file.path}: {type(error).__name__}: {error}"
        return str(DataError(fault, remedy="write the file again, or remove it"))


@contextmanager
def parallel_map(workers: int, *, chunk: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yields a ``map`` over processes, ``chunk`` items at a time; the builtin for one worker."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    pool = None
    try:
        if workers <= 1:
            yield map
            return
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # workers share the cores
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
        yield partial(pool.map, chunksize=chunk)
    except (BrokenProcessPool, MemoryError) as error:
        raise DataError(
            "a process that prepares data was killed or ran out of memory",
            remedy="free memory, or set data.cache_workers=1 if the data have it, and run the same "
            'command again; in your own script, start the work under if __name__ == "__main__":',
        ) from error
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        for name in _THREAD_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def write_missing(
    root: Path,
    names: Sequence[str],
    write: Callable[[str], object],
    *,
    cache: CacheSettings,
    per_worker: int,
    what: str,
) -> None:
    """Calls ``write``, which is pickled for processes, for each name of a generated file, ``what``,
    that is missing below ``root``; ``per_worker`` files justify starting a process.

    A complete set may be in a read-only directory, where no lock can be made.
    """
    if not names:
        return
    with (
        explaining_storage(root, setting="data.root"),
        locked(root / ".lock", wait_s=cache.lock_wait_s),
        progress(f"generating {what}") as advance,
        parallel_map(
            min(cache.workers or usable_cores(), len(names) // per_worker), chunk=4
        ) as mapped,
    ):
        for _ in mapped(write, names):
            advance(len(names))


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    exit_with_parent()
