"""A cache with one row for each file, safe against a kill at any moment.

Shapes: S files.

A cache is a directory named after its content and settings, with ``rows.npy`` [S, ...],
``meta.npy`` [S, K] and ``state.npy`` [S]: whether each row is still to do, done, or belongs to a
corrupt file. A row is marked only after its bytes have reached the disk, so that marked rows are
complete even if the process was killed; the next run continues with the others. Only the process
that holds the lock writes. Rows are written by ``pwrite``, because on a full disk a write through
a memory map would kill the process.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sparsepipe.data.files import (
    MissingFileError,
    ShapeFile,
    UnreadableError,
    check_regular,
    digest_listing,
    digest_values,
    explaining_storage,
    locked,
    unreadable,
)
from sparsepipe.data.points import MappedArray
from sparsepipe.data.processes import MAIN_GUARD, worker_pool
from sparsepipe.errors import DataError
from sparsepipe.utils.files import replacing, write_plain_json
from sparsepipe.utils.progress import progress

_CHUNK_FILES = 8
_CHUNK_BYTES = 1 << 20
"""Limits of a task: large enough to outweigh its overhead, small enough for a smooth bar."""
_SECONDS_PER_WORKER = 1.5
"""Work that repays the start of a process."""
_SECONDS_PER_FILE = 3e-3
_BYTES_PER_S = 8e6
"""Estimated speed of sampling points and of reading text, to choose the number of workers."""
TODO, DONE, CORRUPT = 0, 1, 2
_MARK_ROWS = 64
_MARK_EVERY_S = 2.0
_SPARE_BYTES = 1 << 20

_Fault = dict[str, str]
_Read = Callable[[Path, str], tuple[NDArray[Any], NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of reading one file: a row with its numbers, or a fault."""

    index: int
    row: NDArray[Any] | None = None
    meta_K: NDArray[np.float32] | None = None
    fault: str | None = None


def read_rows(
    read: _Read, files: Sequence[ShapeFile], todo: Sequence[int], *, workers: int
) -> Generator[RowResult]:
    """Rows of the files numbered in ``todo``, in any order.

    Raises:
        DataError: a worker was killed, or a file cannot be read at the moment.
    """
    num_bytes = sum(max(files[index].size_bytes, 0) for index in todo)
    expected_s = len(todo) * _SECONDS_PER_FILE + num_bytes / _BYTES_PER_S
    workers = min(workers, int(expected_s / _SECONDS_PER_WORKER))
    try:
        if workers <= 1:
            for index in todo:
                yield _read_one(read, index, files[index])
        else:
            yield from _read_parallel(read, files, todo, workers)
    except (BrokenProcessPool, MemoryError) as error:
        raise DataError(
            "a process that prepares shapes was killed or ran out of memory",
            remedy="lower data.cache_workers, then run the same command again: what is done "
            f"is kept; {MAIN_GUARD}",
        ) from error


def _read_parallel(
    read: _Read, files: Sequence[ShapeFile], todo: Sequence[int], workers: int
) -> Iterator[RowResult]:
    """Keep a few chunks per worker in flight, which bounds the memory."""
    remaining = _chunks(files, todo)
    waiting: set[Future[list[RowResult]]] = set()
    with worker_pool(workers) as pool:
        while True:
            for chunk in remaining:
                waiting.add(pool.submit(_read_chunk, read, chunk))
                if len(waiting) >= 3 * workers:
                    break
            if not waiting:
                return
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                yield from future.result()


def _chunks(
    files: Sequence[ShapeFile], todo: Sequence[int]
) -> Iterator[list[tuple[int, ShapeFile]]]:
    chunk: list[tuple[int, ShapeFile]] = []
    num_bytes = 0
    for index in todo:
        chunk.append((index, files[index]))
        num_bytes += files[index].size_bytes
        if len(chunk) == _CHUNK_FILES or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _read_chunk(read: _Read, chunk: Sequence[tuple[int, ShapeFile]]) -> list[RowResult]:
    return [_read_one(read, *task) for task in chunk]


def _read_one(read: _Read, index: int, file: ShapeFile) -> RowResult:
    try:
        if file.size_bytes < 0:
            check_regular(file.path)
        row, meta_K = read(file.path, file.digest)
    except MissingFileError as error:
        return RowResult(index, fault=str(error))
    except (UnreadableError, ImportError, MemoryError):
        raise  # the file itself may be valid
    except OSError as error:
        raise unreadable(file.path, error) from error
    except DataError as error:
        return RowResult(index, fault=str(error))
    except Exception as error:  # a file that makes a library fail is corrupt too
        fault = f"{file.path}: {type(error).__name__}: {error}"
        remedy = "write the file again, or remove it"
        return RowResult(index, fault=str(DataError(fault, remedy=remedy)))
    return RowResult(index, row, meta_K)


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


class RowCache:
    """The rows of some files; ``build`` computes missing ones.

    Args:
        files: files in the order of the rows.
        reader: computes the row of a file.
        cache_directory: directory of all caches.
    """

    def __init__(
        self, files: Sequence[ShapeFile], reader: RowReader, *, cache_directory: Path
    ) -> None:
        self.files, self.reader = files, reader
        key = digest_values([reader.settings(), digest_listing(files)])
        self.directory = cache_directory / reader.kind / key
        self.rows = MappedArray(self.directory / "rows.npy")
        self._row_bytes = math.prod(reader.row_shape) * np.dtype(reader.dtype).itemsize

    def state_S(self) -> NDArray[np.uint8]:
        """State of each row: ``TODO``, ``DONE`` or ``CORRUPT``."""
        path = self.directory / "state.npy"
        if not path.is_file():
            return np.zeros(len(self.files), np.uint8)
        state_S: NDArray[np.uint8] = np.load(path)
        return state_S

    def meta_SK(self) -> NDArray[np.float32]:
        """The further numbers of each row."""
        meta_SK: NDArray[np.float32] = np.load(self.directory / "meta.npy")
        return meta_SK

    def corrupt(self) -> _Fault:
        """Names of corrupt files and their faults, with remedies."""
        path = self.directory / "corrupt.json"
        faults: _Fault = json.loads(path.read_text()) if path.is_file() else {}
        return faults

    def build(self, *, workers: int, lock_wait_s: float) -> bool:
        """Compute all missing rows; returns whether there were any.

        Args:
            workers: processes that read files.
            lock_wait_s: how long to wait for another process that builds this cache.

        Raises:
            DataError: the disk is full or not writable, a file cannot be read at the moment, a
                worker was killed, or the lock was not released in time; finished rows are kept.
        """
        with explaining_storage(self.directory, setting="data.cache_dir"):
            if (self.state_S() != TODO).all():
                return False
            with locked(self.directory / "lock", wait_s=lock_wait_s):
                self._allocate()
                todo = np.flatnonzero(self.state_S() == TODO)
                self._check_space(len(todo))
                if len(todo):
                    self._fill([int(row) for row in todo], workers)
                return len(todo) > 0

    def _allocate(self) -> None:
        """Create the files at full length; ``state.npy`` comes last, when the others exist."""
        if (self.directory / "state.npy").is_file():
            return
        count, reader = len(self.files), self.reader
        with replacing(self.directory / "rows.npy") as temporary:
            # A sparse file takes space only as rows are written.
            np.lib.format.open_memmap(
                temporary, mode="w+", dtype=reader.dtype, shape=(count, *reader.row_shape)
            )
        # These two are allocated in full, so that rows can be marked on a full disk.
        with (
            replacing(self.directory / "meta.npy") as temporary,
            temporary.open("wb") as file,
        ):
            np.save(file, np.zeros((count, reader.meta_size), np.float32))
        write_plain_json(
            self.directory / "about.json",
            {"settings": self.reader.settings(), "files": [file.name for file in self.files]},
        )
        with (
            replacing(self.directory / "state.npy") as temporary,
            temporary.open("wb") as file,
        ):
            np.save(file, np.zeros(count, np.uint8))

    def _check_space(self, num_rows: int) -> None:
        needed = num_rows * (self._row_bytes + 4 * self.reader.meta_size + 1) + _SPARE_BYTES
        free = shutil.disk_usage(self.directory).free
        if num_rows and free < needed:
            raise DataError(
                f"the cache in {self.directory} needs {needed / 2**20:,.1f} MiB more, but "
                f"{free / 2**20:,.1f} MiB are free",
                remedy="free some space, set data.cache_dir to a larger disk or lower "
                "data.cached_points, then run the same command again",
            )

    def _fill(self, todo: Sequence[int], workers: int) -> None:
        with (
            _RowWriter(self) as writer,
            progress(f"preparing {self.reader.kind}") as advance,
            closing(read_rows(self.reader, self.files, todo, workers=workers)) as results,
        ):
            for result in results:
                writer.write(result)
                advance(len(todo))


class _RowWriter:
    """Writes rows and marks them as done once they are on the disk."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._faults = cache.corrupt()
        self._pending: list[tuple[int, int]] = []  # row, state
        self._marked_s = time.monotonic()

    def __enter__(self) -> _RowWriter:
        self._files = {
            name: (self._cache.directory / f"{name}.npy").open("r+b", buffering=0)
            for name in ("rows", "meta", "state")
        }
        self._starts = {name: _data_start(file) for name, file in self._files.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Also after Ctrl-C or on a full disk, because rows written before are complete.
            self._mark()
        except OSError:
            if kind is None:
                raise
        finally:
            for file in self._files.values():
                file.close()

    def write(self, result: RowResult) -> None:
        """Write one row, or record that its file is corrupt."""
        if result.fault is None:
            assert result.row is not None
            assert result.meta_K is not None
            self._put("rows", result.index, result.row)
            self._put("meta", result.index, result.meta_K)
            self._pending.append((result.index, DONE))
        else:
            self._faults[self._cache.files[result.index].name] = result.fault
            self._pending.append((result.index, CORRUPT))
        if len(self._pending) >= _MARK_ROWS or time.monotonic() - self._marked_s > _MARK_EVERY_S:
            self._mark()

    def _mark(self) -> None:
        if not self._pending:
            return
        for name in ("rows", "meta"):
            os.fsync(self._files[name].fileno())
        if any(state == CORRUPT for _, state in self._pending):
            write_plain_json(self._cache.directory / "corrupt.json", self._faults)
        for index, state in self._pending:
            self._put("state", index, np.uint8(state))
        self._pending.clear()
        self._marked_s = time.monotonic()

    def _put(self, name: str, index: int, values: NDArray[Any] | np.uint8) -> None:
        data = memoryview(values.tobytes())
        offset = self._starts[name] + index * len(data)
        while data:  # a nearly full disk may take only a part
            written = os.pwrite(self._files[name].fileno(), data, offset)
            data, offset = data[written:], offset + written


def _data_start(file: Any) -> int:
    """Offset in bytes of the values in an ``.npy`` file."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    read(file)
    return int(file.tell())
