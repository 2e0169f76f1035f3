"""The commands that fill a report's cells."""

from __future__ import annotations

import shlex


def command(experiment: str, *overrides: str, sweep: bool = False) -> str:
    """A command line of ``sparsepipe``.

    Args:
        experiment: the option of that group.
        overrides: keys or groups with their values.
        sweep: all combinations of lists.
    """
    words = ["sparsepipe", *(["-m"] if sweep else []), f"experiment={experiment}", *overrides]
    return shlex.join(words)
