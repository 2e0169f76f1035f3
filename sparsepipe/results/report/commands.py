"""The commands that fill a report's cells."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

Usual = Callable[[Sequence[str], Sequence[str]], Mapping[str, Any]]
"""What some keys are where the command line has some overrides; without those that nobody knows."""
_FROM_ENVIRONMENT = re.compile(r"[\w.]+=\$\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Makes the command lines that fill an exhibit's cells.

    Attributes:
        experiment: the option of that group.
        name: that its runs were given in place of the experiment's own; None: none.
        scale: that is asked for; None: any.
        given: overrides of every command.
        environment: variables that every command needs, as ``NAME=value``.
        usual: tells what is set without being given; None: nobody knows.
    """

    experiment: str
    name: str | None = None
    scale: str | None = None
    given: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    usual: Usual | None = None

    def one(self, *overrides: str) -> str:
        """A command that makes one run.

        Args:
            overrides: keys or groups with their values.
        """
        return self._line((), overrides)

    def sweep(self, *overrides: str) -> str:
        """A command that makes all runs of the experiment, see :meth:`one`."""
        return self._line(("-m",), overrides)

    def giving(self, *overrides: str, environment: Sequence[str] = ()) -> Self:
        """Commands that all have these overrides and no others, but for the name."""
        return replace(self, given=overrides, environment=tuple(environment))

    def scaled(self) -> Self:
        """Commands at the scale that is asked for, where no run says what it was made at."""
        return self.giving(f"scale={self.scale}") if self.scale else self

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
            f"{key}={_text(value)}"
            for key, value in wanted.items()
            if key in usual and usual[key] != value
        )

    def _line(self, options: Sequence[str], overrides: Sequence[str]) -> str:
        name = (f"name={self.name}",) if self.name else ()
        words = (*options, f"experiment={self.experiment}", *name, *self.given, *overrides)
        return " ".join([*self.environment, "sparsepipe", *map(_quoted, words)])


def _quoted(word: str) -> str:
    """As a shell takes it, which is to fill in variables."""
    return word if _FROM_ENVIRONMENT.fullmatch(word) else shlex.quote(word)


def _text(value: Any) -> str:
    """As the command line has it; a share of 1.0 is another thing there than 1."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) and value > 1 else str(value)
