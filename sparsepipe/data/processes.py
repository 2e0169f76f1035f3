"""Pools of single-threaded worker processes that exit with their parent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from sparsepipe.utils.parent import exit_with_parent

MAIN_GUARD = 'your own script must start its work under if __name__ == "__main__":'
"""Part of a remedy: without this guard, every new process runs the whole script again."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``workers`` processes, which are terminated if the block raises."""
    with (
        _single_threaded_children(),
        ProcessPoolExecutor(workers, get_context("spawn"), _start_worker) as pool,
    ):
        try:
            yield pool
        except BaseException:
            # Nothing will use their results, so that waiting for them would be in vain.
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    exit_with_parent()


@contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Give processes started in the block one thread each, because they share the cores."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
