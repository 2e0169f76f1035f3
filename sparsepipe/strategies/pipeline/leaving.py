"""How a process ends whose network threads wait for ranks that will not answer."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable

from pytorch_lightning.utilities.exceptions import SIGTERMException


def leave_at_exit(error: BaseException, *, blocked: Callable[[], bool]) -> None:
    """At the end of this process, ends it at once if threads are still blocked then.

    Such threads cannot be ended, and Python's own clean-up aborts in them. What others have
    registered for the end runs before. The status is the error's own, whether or not the
    script caught it: what a later ``sys.exit`` wished is not known there.

    Args:
        error: what ended the run.
        blocked: whether threads wait in vain.
    """
    known = atexit._ncallbacks() + 1
    atexit.register(_leave, status_of(error), blocked, known)


def status_of(error: BaseException) -> int:
    """With which status a process ends that an exception ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SIGTERMException):
        return 128 + signal.SIGTERM
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    return 1


def _leave(status: int, blocked: Callable[[], bool], known: int) -> None:
    if not blocked():
        return
    if atexit._ncallbacks() == known:  # none came later and has run already
        atexit.unregister(_leave)
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)
