"""Completion by a shell: Hydra's own, on the command line as our command reads it."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence

from sparsepipe.config import compose

_FLAGS = {"-sc", "--shell-completion"}
_DIRECTORY = re.compile(r"(?:--config-dir|-cd)[= ]\s*(\S+)\s")


def answerable(arguments: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Arguments with which Hydra can answer a shell that asks what a word could become.

    Args:
        arguments: of the command; returned as they are where no shell asks.
        environment: holds the line to be completed, which is made readable for Hydra.
    """
    line = environment.get("COMP_LINE")
    if line is None or not _FLAGS & set(arguments):
        return list(arguments)
    environment["COMP_LINE"] = readable(line)
    return [*arguments, *directories(line)]


def readable(line: str) -> str:
    """A line for Hydra to complete, whose words before the last it can compose.

    It composes them to know which keys there are, and offers nothing where one is refused that our
    command takes; see :func:`sparsepipe.config.compose.admit`.
    """
    before, space, last = line.rpartition(" ")
    return " ".join(compose.admit(before.split())) + space + last


def directories(line: str) -> list[str]:
    """Arguments for directories of options that the line names: Hydra does not look there."""
    return [f"--config-dir={found}" for found in _DIRECTORY.findall(line)]
