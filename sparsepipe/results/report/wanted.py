"""What was asked for, of whose cells a report tells even where no run has one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
