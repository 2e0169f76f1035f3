"""Ctrl-C, SIGTERM and SIGHUP: the first signal ends a run with a checkpoint, the second at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any, Self

from sparsepipe.runtime.failures.rank_reports import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run."""
log = logging.getLogger(__name__)


def ignore(*signums: signal.Signals) -> None:
    """Ignores ``signums`` from now on, so that this process can report why it ends."""
    if threading.current_thread() is threading.main_thread():
        for signum in signums:
            signal.signal(signum, signal.SIG_IGN)


class SignalWatch:
    """Records signals during training steps, and raises Stopped for signals at any other time.

    Attributes:
        deferred: whether signals are only recorded, since :attr:`signum` is checked regularly.
            Otherwise a signal raises
            :class:`~sparsepipe.runtime.failures.rank_reports.Stopped` where it arrives.
        signum: number of the first signal that has arrived; None: no signal has.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.signum: int | None = None
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Installs the handlers until the block ends."""
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        """Restores the former handlers, except for signals that :func:`ignore` has been given."""
        for signum, handler in self._before.items():
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, handler)

    def install(self) -> None:
        """Installs the handlers, or installs them again if others have replaced them.

        Signals that were ignored when the block began (``nohup``) stay ignored.
        """
        if threading.current_thread() is threading.main_thread():
            for signum, before in self._before.items():
                ignored = before is signal.SIG_IGN
                signal.signal(signum, signal.SIG_IGN if ignored else self._handle)

    def raise_if_stopped(self, broke: BaseException | None = None) -> None:
        """Raises Stopped, with the error ``broke`` as its cause, if a signal has arrived."""
        if self.signum is not None:
            raise Stopped(self.signum) from broke

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._process:  # a child, which Ctrl-C does not end
            if signum != signal.SIGINT:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        if not self.deferred:
            raise Stopped(signum)
        if os.environ.get("RANK", "0") == "0":
            log.warning(
                "%s: writing a checkpoint after this step; a second signal ends the run at once",
                signal.Signals(signum).name,
            )
