"""Beginning again after a failure that may not come again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparsepipe.errors import SparsePipeError, TransportError

log = logging.getLogger(__name__)


def attempt(start: Callable[[], None], *, max_restarts: int) -> None:
    """Calls ``start`` until it returns, at most ``max_restarts`` times more than once.

    Every attempt is to have ranks, store and reports of its own, and to go on from the last
    checkpoint there is.

    Args:
        start: starts all ranks and waits for them.
        max_restarts: how often they may begin again.

    Raises:
        SparsePipeError: of the last attempt, or one that would come again.
    """
    for restart in range(max_restarts + 1):
        try:
            start()
            return
        except SparsePipeError as error:
            if restart == max_restarts or not may_pass(error):
                raise
            log.warning("%s", error.message)
            log.warning("beginning again, restart %d of %d", restart + 1, max_restarts)


def may_pass(error: SparsePipeError) -> bool:
    """Whether another attempt can do better: a rank died, hung, was cut off, or raised.

    Settings, data, checkpoints and hardware stay as they are, and so does a full disk: every
    attempt would train up to the next checkpoint, and not be able to write that either.
    """
    return type(error) in (SparsePipeError, TransportError)
