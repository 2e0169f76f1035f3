"""The commands that fill the cells of a chapter, also without any run."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sparsepipe.report.overrides import Composed, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Runs that a sweep requested: a scale, and further overrides.

    Attributes:
        scale: of the experiment; None: none.
        overrides: of all commands; None: runs at the scale will do whatever their overrides.
        of_task: overrides of the task, which not every cell's command takes.
        seeds: an override with the seed or the seeds; empty: the default. It does not distinguish
            requests, as cells are means over seeds.
    """

    scale: str | None
    overrides: tuple[str, ...] | None = None
    of_task: tuple[str, ...] = ()
    seeds: str = ""

    @property
    def title(self) -> str:
        """The request as text, without paths, which belong to a machine."""
        words = (word for word in self.overrides or () if not word.startswith("data.root="))
        return self._in_words(words)

    @property
    def placed_title(self) -> str:
        """The request as text with paths, if only these distinguish it from others."""
        return self._in_words(self.overrides or ())

    @property
    def setting(self) -> tuple[str, ...]:
        """Overrides that determine which runs can be compared."""
        scale = (f"scale={self.scale}",) if self.scale else ()
        return (*scale, *(self.overrides or ()))

    @property
    def given(self) -> tuple[str, ...]:
        """Overrides without those of the task."""
        return (*self.setting, self.seeds) if self.seeds else self.setting

    def _in_words(self, words: Iterable[str]) -> str:
        scale = (f"scale {self.scale}",) if self.scale else ()
        return "; ".join((*scale, *words, *self.of_task))


_FROM_ENVIRONMENT = re.compile(r"[\w.]+=\$\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Makes the command lines that fill a chapter's cells.

    Attributes:
        experiment: the option of that group.
        name: that its runs were given in place of the experiment's own; None: none.
        outputs: the directory that its runs are written to; None: the usual one.
        scales: whose cells are words of even where no run has one of them.
        requests: likewise, at a scale and with overrides.
        given: overrides of every command.
        of_task: of the task, which not every cell's command takes; the chapter knows which do.
        environment: variables that every command needs, as ``NAME=value``.
        composed: returns values of keys in the configuration that overrides compose; None: unknown.
    """

    experiment: str
    name: str | None = None
    outputs: str | None = None
    scales: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    given: tuple[str, ...] = ()
    of_task: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    composed: Composed | None = None

    def one(self, *overrides: str) -> str:
        """A command that makes one run; a run for each seed where several are given."""
        several = any(word.startswith("seed=") and "," in word for word in self.given)
        return self._line(("-m",) if several else (), overrides)

    def sweep(self, *overrides: str) -> str:
        """A command that makes all runs of the experiment, see :meth:`one`."""
        return self._line(("-m",), overrides)

    def giving(self, *overrides: str, environment: Sequence[str] = ()) -> Self:
        """Commands with exactly these overrides, apart from name and paths."""
        return replace(self, given=overrides, environment=tuple(environment))

    def unlike(self, overrides: Sequence[str], expected: Mapping[str, Any]) -> tuple[str, ...]:
        """Further overrides, of keys that would not be as expected with these alone."""
        if self.composed is None:
            return ()
        found = self.composed((f"experiment={self.experiment}", *overrides), tuple(expected))
        return tuple(
            word(key, value)
            for key, value in expected.items()
            if key in found and found[key] != value
        )

    def _line(self, options: Sequence[str], overrides: Sequence[str]) -> str:
        name = (f"name={self.name}",) if self.name else ()
        place = (word("paths.outputs", self.outputs),) if self.outputs else ()
        start = (*options, f"experiment={self.experiment}", *name)
        words = (*start, *self.given, *overrides, *place)
        return " ".join([*self.environment, "sparsepipe", *map(_quoted, words)])


def _quoted(argument: str) -> str:
    """The argument in double quotes, in which a shell expands variables."""
    return f'"{argument}"' if _FROM_ENVIRONMENT.fullmatch(argument) else shlex.quote(argument)


_SWEPT_SCALE = "hydra.sweeper.params.scale"
"""Key of the scale at which an experiment is swept by default."""
_PLACES = ("data.cache_dir", "data.root")
"""Keys that say where data are: the same data may be elsewhere."""


def missing_commands(commands: Commands, existing: Collection[Commands]) -> dict[str, Commands]:
    """Commands of the cells that no run is for, by the title of their block.

    Returns:
        Commands for each request that no block has. Without requests and blocks, those of the
        scale at which the experiment is swept by default, if it has one.
    """
    lacking = [
        request
        for request in _requests(commands, is_any_covered=bool(existing))
        if not any(_is_covered(request, block) for block in existing)
    ]
    is_alone = not existing and len(lacking) == 1 and not lacking[0].overrides
    alike = Counter(title for title, _ in {(each.title, each.setting) for each in lacking})
    found = {}
    for request in lacking:
        title = request.title if alike[request.title] == 1 else request.placed_title
        made = replace(commands.giving(*request.given), of_task=request.of_task)
        found["" if is_alone else title] = made
    return found


def _requests(commands: Commands, *, is_any_covered: bool) -> list[Request]:
    precise = {request.scale for request in commands.requests}
    found = [Request(scale=scale) for scale in commands.scales if scale not in precise]
    found += commands.requests
    if found or is_any_covered:
        return found
    return [Request(scale=_swept_scale(commands))]


def _swept_scale(commands: Commands) -> str | None:
    """The default scale of the experiment's sweep; None where there is none."""
    if commands.composed is None:
        return None
    experiment = f"experiment={commands.experiment}"
    found = commands.composed((experiment,), (_SWEPT_SCALE,)).get(_SWEPT_SCALE)
    return None if found is None else str(found)


def _is_covered(request: Request, block: Commands) -> bool:
    """Whether runs of a request belong to an existing block."""
    scales = {word for word in block.given if word.startswith("scale=")}
    if scales != ({f"scale={request.scale}"} if request.scale else set()):
        return False
    return request.overrides is None or _unplaced(request.setting) == _unplaced(block.given)


def _unplaced(words: Sequence[str]) -> set[str]:
    return {word for word in words if word.partition("=")[0] not in _PLACES}
