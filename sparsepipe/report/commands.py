"""The commands that fill the cells of a chapter, also of those that no run is for."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sparsepipe.report.overrides import Usual, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A scale, and what was asked for beside it.

    Attributes:
        scale: of the experiment; None: none.
        overrides: of all commands; None: runs at the scale will do whatever their overrides.
        of_task: overrides of the task, which not every cell's command takes.
        seeds: an override with the seed or the seeds; empty: the usual one. No run is wanted
            because of it, as cells are means over seeds.
    """

    scale: str | None
    overrides: tuple[str, ...] | None = None
    of_task: tuple[str, ...] = ()
    seeds: str = ""

    @property
    def title(self) -> str:
        """In words, without places, which belong to a machine."""
        told = (word for word in self.overrides or () if not word.startswith("data.root="))
        return self._in_words(told)

    @property
    def placed_title(self) -> str:
        """With them, where nothing else tells it from others."""
        return self._in_words(self.overrides or ())

    @property
    def setting(self) -> tuple[str, ...]:
        """What of the command line says which runs can be compared."""
        scale = (f"scale={self.scale}",) if self.scale else ()
        return (*scale, *(self.overrides or ()))

    @property
    def given(self) -> tuple[str, ...]:
        """Of the command line, but for the task."""
        return (*self.setting, self.seeds) if self.seeds else self.setting

    def _in_words(self, told: Iterable[str]) -> str:
        scale = (f"scale {self.scale}",) if self.scale else ()
        return "; ".join((*scale, *told, *self.of_task))


_FROM_ENVIRONMENT = re.compile(r"[\w.]+=\$\w+")


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


def _quoted(argument: str) -> str:
    """As a shell takes it, which is to fill in variables."""
    return f'"{argument}"' if _FROM_ENVIRONMENT.fullmatch(argument) else shlex.quote(argument)


_SWEPT_SCALE = "hydra.sweeper.params.scale"
"""At which an experiment is swept where the command line has no scale."""
_PLACES = ("data.cache_dir", "data.root")
"""Keys that say where data are: the same data may be elsewhere."""


def of_missing(commands: Commands, told: Collection[Commands]) -> dict[str, Commands]:
    """Commands of the cells that no run is for, by the title of their block.

    Args:
        commands: of the experiment; they say what is asked for.
        told: those of the blocks that there are.

    Returns:
        Some for each scale, with its overrides, that is asked for and is that of no block. Where
        nothing is asked for and there is no block, those of the one scale at which the experiment
        is swept by itself, if it is swept at one.
    """
    lacking = [
        wanted
        for wanted in _wanted(commands, is_any_told=bool(told))
        if not any(_is_told(wanted, block) for block in told)
    ]
    is_alone = not told and len(lacking) == 1 and not lacking[0].overrides
    alike = Counter(title for title, _ in {(each.title, each.setting) for each in lacking})
    return {
        "" if is_alone else _title(wanted, alike): replace(
            commands.giving(*wanted.given), of_task=wanted.of_task
        )
        for wanted in lacking
    }


def _title(wanted: Wanted, alike: Mapping[str, int]) -> str:
    """Of its own where only places differ: else one block would be that of several."""
    return wanted.title if alike[wanted.title] == 1 else wanted.placed_title


def _wanted(commands: Commands, *, is_any_told: bool) -> list[Wanted]:
    precise = {wanted.scale for wanted in commands.wanted}
    found = [Wanted(scale=scale) for scale in commands.scales if scale not in precise]
    found += commands.wanted
    if found or is_any_told:
        return found
    return [Wanted(scale=_swept_scale(commands))]


def _swept_scale(commands: Commands) -> str | None:
    """None where the experiment has none, or nobody knows."""
    if commands.usual is None:
        return None
    experiment = f"experiment={commands.experiment}"
    found = commands.usual((experiment,), (_SWEPT_SCALE,)).get(_SWEPT_SCALE)
    return None if found is None else str(found)


def _is_told(wanted: Wanted, block: Commands) -> bool:
    """Whether runs of what is wanted come into a block that is there."""
    scales = {word for word in block.given if word.startswith("scale=")}
    if scales != ({f"scale={wanted.scale}"} if wanted.scale else set()):
        return False
    return wanted.overrides is None or _unplaced(wanted.setting) == _unplaced(block.given)


def _unplaced(words: Sequence[str]) -> set[str]:
    return {word for word in words if word.partition("=")[0] not in _PLACES}
