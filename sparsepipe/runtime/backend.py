"""How the backend's own errors are told from those of users."""

from __future__ import annotations

import re

_ORIGIN = re.compile(r"gloo/|c10d|nccl", re.IGNORECASE)


def of_backend(kind: str, message: str) -> bool:
    """Whether an exception is the backend's: of a wait for ranks, and not somebody's mistake.

    Args:
        kind: the exception's class.
        message: its text.
    """
    return kind.startswith("Dist") or (kind == "RuntimeError" and bool(_ORIGIN.search(message)))
