"""The line of a shell as Hydra can complete it."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence

from sparsepipe.config.compose import admit

_COMPLETION_FLAGS = {"-sc", "--shell-completion"}
_CONFIG_DIRECTORY = re.compile(r"(?:--config-dir|-cd)[= ]\s*(\S+)\s")


def completion_arguments(
    arguments: Sequence[str], environment: MutableMapping[str, str]
) -> list[str]:
    """The command's arguments, with which Hydra can complete the line of a shell.

    Unchanged where no shell completes; else the line in ``environment`` is made readable for Hydra.
    """
    line = environment.get("COMP_LINE")
    if line is None or not _COMPLETION_FLAGS & set(arguments):
        return list(arguments)
    environment["COMP_LINE"] = readable(line)
    # Hydra does not look in these by itself.
    directories = [f"--config-dir={found}" for found in _CONFIG_DIRECTORY.findall(line)]
    return [*arguments, *directories]


def readable(line: str) -> str:
    """A line for Hydra to complete, whose words before the last it can compose.

    It composes them to know which keys there are, and offers nothing where one is refused that our
    command takes; see :func:`sparsepipe.config.compose.admit`.
    """
    before, space, last = line.rpartition(" ")
    return " ".join(admit(before.split())) + space + last
