"""How a rank leaves when something went wrong: told, and at once."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from sparsepipe.runtime.reports import report_failure


def abandon(error: BaseException, *, exit_code: int | None = None) -> NoReturn:
    """Tells of ``error`` and ends this process without any clean-up.

    What clean-up there is would wait for ranks that are gone: threads that gloo blocks
    cannot be ended, and destroying their groups hangs or aborts. The peers' connections
    break at once, so they hear of it in their next call.

    Args:
        error: what happened; left for the launching process, or printed to stderr where
            that is not possible.
        exit_code: status, never 0; by default the error's own, or 1.
    """
    code = getattr(error, "exit_code", 1) if exit_code is None else exit_code
    trace = "".join(traceback.format_exception(error))
    try:
        told = report_failure(error, exit_code=code, trace=trace)
    except OSError:  # a full disk, which may be the very error
        told = False
    # The streams may be files on that disk, or pipes that nobody reads any more.
    with suppress(OSError, ValueError):
        if not told:
            sys.stderr.write(trace)
        logging.shutdown()
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code or 1)
