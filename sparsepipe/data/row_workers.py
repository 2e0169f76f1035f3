"""Reading files in parallel processes that end when their parent does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import UnreadableError, unreadable
from sparsepipe.data.manifest import ShapeFile
from sparsepipe.data.processes import MAIN_GUARD, worker_pool
from sparsepipe.errors import DataError

_CHUNK_FILES = 8
_CHUNK_BYTES = 1 << 20
"""A task: enough files to outweigh its overhead, few enough for a smooth progress bar."""

_SECONDS_PER_WORKER = 1.5
"""Work that is worth starting a process for."""

_SECONDS_PER_FILE = 3e-3
_BYTES_PER_S = 8e6
"""Guesses, to weigh work against the start of a process: sampling points, reading text."""

_Read = Callable[[Path, str], tuple[NDArray[Any], NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of one file: a row and its numbers, or a fault."""

    index: int
    row: NDArray[Any] | None = None
    meta_K: NDArray[np.float32] | None = None
    fault: str | None = None


def read_rows(
    read: _Read, files: Sequence[ShapeFile], todo: Sequence[int], *, workers: int
) -> Generator[RowResult]:
    """Rows of the files numbered in ``todo``, in any order.

    Raises:
        DataError: a worker was killed, or a file cannot be read just now.
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
    """Keep a few chunks for each worker under way, so that memory stays bounded."""
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
    if file.size_bytes < 0:
        return RowResult(index, fault=f"{file.path} does not exist")
    try:
        row, meta_K = read(file.path, file.digest)
    except (UnreadableError, ImportError, MemoryError):
        raise  # says nothing about what the file holds
    except OSError as error:
        raise unreadable(file.path, error) from error
    except DataError as error:
        return RowResult(index, fault=error.message)
    except Exception as error:  # a mesh that trips the libraries is corrupt too
        return RowResult(index, fault=f"{file.path}: {type(error).__name__}: {error}")
    return RowResult(index, row, meta_K)
