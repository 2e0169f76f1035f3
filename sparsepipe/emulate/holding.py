"""Lets signals wait while hosts are made or removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Lets signals wait that would end this process amid its work; then the first one counts.

    It counts once, however many have come: to whoever handles it, a second one would mean to end
    at once, before anything that was made is removed. Those that are ignored stay so.
    """
    came: list[int] = []
    # Blocked as well, for the commands that are started within: a terminal's Ctrl-C is for them
    # too. To block them alone does not hold them: libraries have threads that take them.
    handlers = _taken_over(came)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if came:
            signal.raise_signal(came[0])


def _taken_over(came: list[int]) -> dict[signal.Signals, Any]:
    """Handlers of the signals that are now noted; none in a thread, which may not set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def note(signum: int, frame: FrameType | None) -> None:
        del frame
        came.append(signum)

    handlers = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    heeded = {s: h for s, h in handlers.items() if h not in (signal.SIG_IGN, None)}
    for signum in heeded:
        signal.signal(signum, note)
    return heeded
