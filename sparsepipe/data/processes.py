"""Worker processes that end when their parent does, each with one thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process

MAIN_GUARD = 'a script of your own must start its work under if __name__ == "__main__":'
"""Part of a remedy: without the guard, each process that starts runs the script again."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``workers`` processes; an exception ends them in the middle of their work."""
    with (
        _single_threaded_children(),
        ProcessPoolExecutor(workers, get_context("spawn"), _start_worker) as pool,
    ):
        try:
            yield pool
        except BaseException:
            # Nobody will take what they are working on, so nobody should wait for it.
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


@contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Processes started inside the block get one thread each: they share the cores."""
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
