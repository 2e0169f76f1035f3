"""The cache of prepared data: a row for each file, built once and written whole or not at all.

Shapes: S files.

A cache is a directory named after the contents of the files and the settings of what reads them,
with ``rows.npy`` [S, ...], ``meta.npy`` [S, K], and ``corrupt.json``, the faults of corrupt files.
``rows.npy`` gets its name last: where it exists, the cache is complete. A build that is interrupted
or killed begins again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import (
    LOCK_WAIT_S,
    MissingFileError,
    ShapeFile,
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
from sparsepipe.utils.parent import exit_with_parent
from sparsepipe.utils.progress import progress

_VERSION = 2
"""Increased with any change to the files of a cache."""
_SECONDS_PER_WORKER = 1.5
"""Work that repays the start of a process."""
_SECONDS_PER_FILE = 3e-3
_BYTES_PER_S = 8e6
"""Estimated speed of sampling points and of reading text, to choose the number of workers."""
_CHUNK_FILES, _PORTION_FILES = 8, 1024
"""Files that a worker reads at once; files whose rows may wait in memory to be written."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

MAIN_GUARD = 'your own script must start its work under if __name__ == "__main__":'
"""Part of a remedy: without this guard, every new process runs the whole script again."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Settings of the cache in which a source keeps prepared data; see ``ShapeDataModule``.

    Attributes:
        directory: directory of all caches; it can be deleted, since caches are built again.
        points: points sampled from each mesh.
        seed: seed of the sampling.

    Raises:
        ConfigError: a number is too small; the message names its configuration key.
    """

    directory: Path
    points: Count = 16_384
    seed: Seed = 0
    strict: bool = False
    workers: CountFrom0 = 0
    lock_wait_s: float = LOCK_WAIT_S


class RowReader(Protocol):
    """Computes the row of a file; it is pickled for worker processes.

    Attributes:
        kind: name of the rows, part of the directory's name.
        row_shape: shape of a row.
        dtype: numpy type of a row.
        meta_size: K, further numbers for each row.
    """

    @property
    def kind(self) -> str: ...
    @property
    def row_shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def meta_size(self) -> int: ...

    def settings(self) -> dict[str, Any]:
        """Everything besides the files that determines the rows, with the algorithm's version."""
        ...

    def __call__(self, path: Path, digest: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The row and the K numbers of one file.

        Raises:
            DataError: the file is corrupt.
        """
        ...


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The rows of some files.

    Attributes:
        directory: directory of this cache.
        rows: rows [S, ...], memory-mapped; those of corrupt files are zeros.
        meta_SK: the further numbers of each row.
        usable_S: numbers of the files that are not corrupt.
        faults: names of corrupt files and their faults, with remedies.
        is_new: whether this call has built the cache.
    """

    directory: Path
    rows: MappedArray
    meta_SK: NDArray[np.float32]
    usable_S: IntArray
    faults: Mapping[str, str]
    is_new: bool


def cached_rows(
    files: Sequence[ShapeFile], reader: RowReader, settings: CacheSettings
) -> CachedRows:
    """The rows of some files in their order, computed by several processes if they are missing.

    Args:
        files: files with their digests.
        reader: computes the row of a file.
        settings: directory of all caches, processes, and how long to wait for another builder.

    Raises:
        DataError: the disk is full or not writable, a file cannot be read at the moment, a worker
            was killed, or another process has been building this cache for too long.
    """
    key = digest_values([_VERSION, reader.settings(), digest_listing(files)])
    directory = settings.directory / reader.kind / key
    path, is_new = directory / "rows.npy", False
    with explaining_storage(directory, setting="data.cache_dir"):
        if not path.is_file():
            with locked(directory / "lock", wait_s=settings.lock_wait_s):
                if not path.is_file():
                    _build(path, files, reader, settings.workers or usable_cores())
                    is_new = True
        faults: Mapping[str, str] = json.loads((directory / "corrupt.json").read_text())
        return CachedRows(
            directory=directory,
            rows=MappedArray(path),
            meta_SK=np.load(directory / "meta.npy"),
            usable_S=np.flatnonzero([file.name not in faults for file in files]),
            faults=faults,
            is_new=is_new,
        )


def _build(path: Path, files: Sequence[ShapeFile], reader: RowReader, workers: int) -> None:
    faults = dict[str, str]()
    meta_SK = np.zeros((len(files), reader.meta_size), np.float32)
    with (
        new_array(path, dtype=reader.dtype, shape=(len(files), *reader.row_shape)) as rows,
        progress(f"preparing {reader.kind}") as advance,
        closing(_read_all(reader, files, workers)) as results,
    ):
        for index, result in enumerate(results):
            if isinstance(result, str):
                faults[files[index].name] = result
            else:
                rows[index], meta_SK[index] = result
            advance(len(files))
        with replacing(path.with_name("meta.npy")) as temporary, temporary.open("wb") as file:
            np.save(file, meta_SK)
        write_plain_json(path.with_name("corrupt.json"), faults)


def _read_all(
    reader: RowReader, files: Sequence[ShapeFile], workers: int
) -> Generator[tuple[NDArray[Any], NDArray[np.float32]] | str]:
    """The row and numbers, or the fault, of each file in order."""
    num_bytes = sum(max(file.size_bytes, 0) for file in files)
    expected_s = len(files) * _SECONDS_PER_FILE + num_bytes / _BYTES_PER_S
    workers = min(workers, int(expected_s / _SECONDS_PER_WORKER))
    read = partial(_read_one, reader)
    try:
        if workers <= 1:
            yield from map(read, files)
            return
        with worker_pool(workers) as pool:
            for start in range(0, len(files), _PORTION_FILES):
                portion = files[start : start + _PORTION_FILES]
                yield from pool.map(read, portion, chunksize=_CHUNK_FILES)
    except (BrokenProcessPool, MemoryError) as error:
        raise DataError(
            "a process that prepares shapes was killed or ran out of memory",
            remedy=f"lower data.cache_workers, then run the same command again; {MAIN_GUARD}",
        ) from error


def _read_one(reader: RowReader, file: ShapeFile) -> tuple[NDArray[Any], NDArray[np.float32]] | str:
    try:
        if file.size_bytes < 0:
            check_regular(file.path)
        return reader(file.path, file.digest)
    except MissingFileError as error:
        return str(error)
    except (UnreadableError, ImportError, MemoryError):
        raise  # the file itself may be valid
    except OSError as error:
        raise unreadable(file.path, error) from error
    except DataError as error:
        return str(error)
    except Exception as error:  # a file that makes a library fail is corrupt too
        fault = f"{file.path}: {type(error).__name__}: {error}"
        return str(DataError(fault, remedy="write the file again, or remove it"))


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of single-threaded processes, which end with this one.

    Where the block raises, work that has not begun is cancelled.
    """
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # workers share the cores
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    exit_with_parent()
