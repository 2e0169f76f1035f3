"""A sweep starts its own ranks: it does not run as one of torchrun's processes."""

from __future__ import annotations

import os

from sparsepipe.errors import ConfigError


def refuse_within_torchrun() -> None:
    """Refuses to sweep in a process that another launcher has started as a rank.

    Raises:
        ConfigError: it has.
    """
    if "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "a sweep (-m) within torchrun",
            remedy="start the command without torchrun: every job starts its own ranks",
        )
