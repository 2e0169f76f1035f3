"""Data that are built into a cache by one process, while others wait for it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

from sparsepipe.data.lock import locked
from tests.support.tinyhouse import LONG_S, VectorData


class CachedData(VectorData):
    """Data whose cache is built once somebody makes the file ``go on``.

    Args:
        lock: whether one process builds it while others wait, as for the house's own caches.
        settings: of the data.
    """

    def __init__(self, *, lock: bool = True, **settings) -> None:
        super().__init__(**settings)
        self.lock = lock

    def prepare_data(self) -> None:
        with locked(Path("cache.lock"), wait_s=LONG_S) if self.lock else nullcontext():
            deadline_s = time.monotonic() + LONG_S
            Path("building").touch()
            while not Path("go on").exists():
                assert time.monotonic() < deadline_s, "nobody lets it go on"
                time.sleep(0.02)
