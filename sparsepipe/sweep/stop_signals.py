"""Ctrl-C and SIGTERM while a sweep's jobs run: noted, for the sweep to pass on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sparsepipe.runs.signals import SIGNALS


@contextmanager
def heard() -> Iterator[list[int]]:
    """The signals that have come so far, while the block runs; what was ignored still is."""
    found: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def note(signum: int, frame: FrameType | None) -> None:
        del frame
        found.append(signum)

    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, note)
    try:
        yield found
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
