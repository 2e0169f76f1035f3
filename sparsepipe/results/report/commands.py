"""The commands that fill a report's cells."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sparsepipe.results.report.wanted import Wanted

Usual = Callable[[Sequence[str], Sequence[str]], Mapping[str, Any]]
"""What some keys are where the command line has some overrides; without those that nobody knows."""
_FROM_ENVIRONMENT = re.compile(r"[\w.]+=\$\w+")
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
"""Text that needs no quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Makes the command lines that fill an exhibit's cells.

    Attributes:
        experiment: the option of that group.
        name: that its runs were given in place of the experiment's own; None: none.
        outputs: the directory that its runs are written to; None: the usual one.
        scales: whose cells are told of even where no run has one of them.
        wanted: likewise, at a scale and with overrides.
        given: overrides of every command.
        of_task: of the task, which not every cell's command takes; the exhibit knows which do.
        environment: variables that every command needs, as ``NAME=value``.
        usual: tells what is set without being given; None: nobody knows.
    """

    experiment: str
    name: str | None = None
    outputs: str | None = None
    scales: tuple[str, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    given: tuple[str, ...] = ()
    of_task: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    usual: Usual | None = None

    def one(self, *overrides: str) -> str:
        """A command that makes one run; a run for each seed where several are given.

        Args:
            overrides: keys or groups with their values.
        """
        several = any(word.startswith("seed=") and "," in word for word in self.given)
        return self._line(("-m",) if several else (), overrides)

    def sweep(self, *overrides: str) -> str:
        """A command that makes all runs of the experiment, see :meth:`one`."""
        return self._line(("-m",), overrides)

    def giving(self, *overrides: str, environment: Sequence[str] = ()) -> Self:
        """Commands that all have these overrides and no others, but for the name and the place."""
        return replace(self, given=overrides, environment=tuple(environment))

    def unlike(self, overrides: Sequence[str], wanted: Mapping[str, Any]) -> tuple[str, ...]:
        """Further overrides, of keys that would not be as wanted with these alone.

        Args:
            overrides: keys or groups with their values.
            wanted: values by their keys.
        """
        if self.usual is None:
            return ()
        usual = self.usual((f"experiment={self.experiment}", *overrides), tuple(wanted))
        return tuple(
            word(key, value)
            for key, value in wanted.items()
            if key in usual and usual[key] != value
        )

    def _line(self, options: Sequence[str], overrides: Sequence[str]) -> str:
        name = (f"name={self.name}",) if self.name else ()
        place = (word("paths.outputs", self.outputs),) if self.outputs else ()
        start = (*options, f"experiment={self.experiment}", *name)
        words = (*start, *self.given, *overrides, *place)
        return " ".join([*self.environment, "sparsepipe", *map(_quoted, words)])


def word(key: str, value: Any) -> str:
    """An override as the command line has it."""
    return f"{key}={_text(value)}"


def _quoted(argument: str) -> str:
    """As a shell takes it, which is to fill in variables."""
    return f'"{argument}"' if _FROM_ENVIRONMENT.fullmatch(argument) else shlex.quote(argument)


def _text(value: Any) -> str:
    """As Hydra reads it; a share of 1.0 is another thing there than 1."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and value > 1 and value.is_integer():
        return str(int(value))
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)
