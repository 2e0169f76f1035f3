"""Which runs have a setting in common, and the blocks of a table that these make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands, Usual
from sparsepipe.results.report.exhibit import Block
from sparsepipe.results.report.missing import of_missing
from sparsepipe.results.report.overridden import (
    Matters,
    is_made_by,
    of_memory,
    of_training,
    overrides_of,
)
from sparsepipe.results.report.setting_commands import commands_of
from sparsepipe.results.report.settings import Setting

CellOf = Callable[[Row], Sequence[str] | None]
"""Overrides of the cell that a run is for, beside those of its setting; None: it is for none."""
Make = Callable[[Sequence[Row], Commands, Setting | None], Block]
"""Makes a block of the runs of a setting; None: there is no run."""

TRAININGS, FITTING = ("train", "train_if_fits"), "fit_batch"
OF_TRIALS = {"task.budget_bytes": "budget_bytes", "task.steps": "steps"}
"""Keys of what is asked of a batch to fit, by the attribute of the setting."""
_NOT_OF_MEMORY = frozenset({"tested", "trained", "epochs", "batches", "threads"})
"""Of a setting: what fits into memory depends on none of these."""


def blocks_of(
    rows: Sequence[Row], commands: Commands, *, cell_of: CellOf, make: Make
) -> list[Block]:
    """A block for each setting that runs have, and of missing cells where there is no run.

    Args:
        rows: finished runs of an experiment. Those that began with trained weights are left out.
        commands: as they are for any setting.
        cell_of: tells the cell of a run.
        make: makes a block.
    """
    begun = [row for row in rows if row.get("first_weights")]
    fresh = [row for row in rows if not row.get("first_weights")]
    settings = settings_of(fresh, commands, cell_of=cell_of)
    made_by = {
        setting: commands_of(setting, theirs, commands) for setting, theirs in settings.items()
    }
    found = [make(theirs, made_by[setting], setting) for setting, theirs in settings.items()]
    missing = of_missing(commands, made_by.values())
    found += [replace(make([], theirs, None), title=title) for title, theirs in missing.items()]
    first, *others = found
    return [replace(first, notes=(*first.notes, *_left_out(begun))), *others]


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        names = ", ".join(str(row.get("run_id")) for row in rows)
        yield (
            f"Left out: {names}, which began with trained weights (checkpoint=). With a name= of "
            "their own they have a report of their own."
        )


def settings_of(
    rows: Sequence[Row], commands: Commands, *, cell_of: CellOf
) -> dict[Setting, list[Row]]:
    """Trainings, and what was measured for them, by what they have in common.

    A run belongs to each setting whose command for its cell gives its configuration. Trainings on
    several devices belong to all on one that are alike but for its threads. What fits into memory
    depends neither on threads nor on how long is trained.

    Args:
        rows: finished runs.
        commands: of their experiment; they tell overrides from what is usual, if anybody knows.
        cell_of: tells the cell of a run.
    """
    runs = [run for row in rows if (run := _Run.of(row, commands, cell_of(row))) is not None]
    found: dict[Setting, None] = {}
    for run in sorted(runs, key=lambda run: run.place):
        found.update(dict.fromkeys(run.new_settings(list(found))))
    members = {setting: [run.row for run in runs if run.is_of(setting)] for setting in found}
    apart = dict(each for item in members.items() for each in _by_trial(*item))
    return dict(sorted(apart.items(), key=lambda item: _order(item[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run that is for a cell.

    Attributes:
        row: what it tells.
        own: its setting, as far as it has one by itself.
        unsaid: attributes of the setting that it says nothing of.
        command: of its cell, without overrides.
        matters: keys of its configuration that count.
        usual: tells the configuration of a command; None: nobody knows.
    """

    row: Row
    own: Setting
    unsaid: frozenset[str]
    command: tuple[str, ...]
    matters: Matters
    usual: Usual | None

    @classmethod
    def of(cls, row: Row, commands: Commands, cell: Sequence[str] | None) -> Self | None:
        """None where it is for no cell."""
        task = row.get("task_name")
        if cell is None or task not in (*TRAININGS, FITTING):
            return None
        base, is_fitting = Setting.of(row), task == FITTING
        counted = of_memory if is_fitting else of_training
        command = (f"experiment={commands.experiment}", *base.overrides, *cell)

        def matters(key: str) -> bool:
            is_of_trial = key in OF_TRIALS and task == "train_if_fits"
            return is_of_trial or (counted(key) and not Setting.has(key))

        others = (
            () if commands.usual is None else overrides_of(row, command, commands.usual, matters)
        )
        return cls(
            row=row,
            own=replace(base, others=others, threads=None if is_fitting else base.threads),
            unsaid=_unsaid(row, base),
            command=command,
            matters=matters,
            usual=commands.usual,
        )

    @property
    def place(self) -> tuple[bool, int]:
        """Those that say most come first."""
        return self.row["task_name"] == FITTING, len(self.unsaid)

    def new_settings(self, found: Sequence[Setting]) -> list[Setting]:
        """Those that it brings to others that are there."""
        if not self.unsaid:
            return [self.own]
        if any(map(self.is_of, found)):
            return []
        alike = [replace(each, others=self.own.others) for each in found if self._is_alike(each)]
        return alike or [self.own]

    def is_of(self, setting: Setting) -> bool:
        """Whether the setting's command for its cell gives its configuration."""
        if not self._is_alike(setting):
            return False
        return setting.others == self.own.others or (
            self.usual is not None
            and is_made_by(self.row, self.command, setting.others, self.usual, self.matters)
        )

    def _is_alike(self, setting: Setting) -> bool:
        """But for overrides."""
        said = {each.name for each in fields(Setting)} - self.unsaid - {"others"}
        return all(getattr(setting, name) == getattr(self.own, name) for name in said)


def _unsaid(row: Row, base: Setting) -> frozenset[str]:
    if row["task_name"] == FITTING:
        return _NOT_OF_MEMORY
    several = {"threads"} if row.get("ranks") != 1 else set()
    # What did not fit has not counted its shapes.
    uncounted = {"trained"} if base.shapes is None and base.trained is None else set()
    return frozenset(several | uncounted)


def _by_trial(setting: Setting, rows: Sequence[Row]) -> Iterator[tuple[Setting, list[Row]]]:
    """Largest batches by unlike trials are not set against each other."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["task_name"] == FITTING:
            found.setdefault(tuple(map(row.get, OF_TRIALS)), []).append(row)
    if len(found) < 2:
        yield setting, list(rows)
        return
    asked = [dict(zip(OF_TRIALS.values(), trial, strict=True)) for trial in found]
    unlike = {name for name in OF_TRIALS.values() if len({trial[name] for trial in asked}) > 1}
    for trial, searches in zip(asked, found.values(), strict=True):
        own = {name: value for name, value in trial.items() if name in unlike}
        yield (
            replace(setting, **own),
            [row for row in rows if row["task_name"] != FITTING or _is_in(row, searches)],
        )


def _is_in(row: Row, rows: Sequence[Row]) -> bool:
    return any(row is each for each in rows)


def _order(setting: Setting) -> tuple[str, ...]:
    """Without overrides first."""
    others = "; ".join(setting.others)
    return (*(str(getattr(setting, each.name)) for each in fields(Setting)[:-1]), others)
