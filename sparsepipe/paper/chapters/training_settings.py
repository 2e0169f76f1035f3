"""Runs grouped by their common setting, and a block of a table for each setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sparsepipe.report.chapter import Block, Compare, Row
from sparsepipe.report.commands import Commands, missing_commands
from sparsepipe.report.overrides import (
    Composed,
    Matters,
    is_made_by,
    of_memory,
    of_training,
    overrides_of,
)

GENERATED = "GeneratedShapes"
_DATA = {
    GENERATED: ("generated shapes", "shapes"),
    "NpzBundle": ("ModelNet40 as point clouds", "modelnet40_points"),
    "OffTree": ("meshes as OFF files", "modelnet40"),
    "NormalResampled": ("ModelNet40 with normals", "modelnet40_normal_resampled"),
}
"""Sources: in words, and the option of ``data`` that has them. But for the first one they are
files, in a directory that the environment variable of the option's name holds."""
USUAL = "shapes"
"""The option of ``data`` that needs no files."""
_OWN_KEYS = {
    "data.num_points": "points",
    "data.source.train_per_class": "shapes",
    "data.source.test_per_class": "tested",
    "model.width": "width",
    "trainer.max_epochs": "epochs",
    "trainer.limit_train_batches": "batches",
}
_OWN_TARGET = "data.source._target_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings that trainings must share for their figures to be compared.

    Attributes:
        scale: of the experiment.
        data: source of the shapes.
        points: drawn of each shape; None: all.
        shapes: of each class that are trained on, where they are generated.
        tested: likewise, of each class that are tested on.
        trained: all shapes that are trained on, where they are files.
        width: of the network, as a share of the paper's.
        epochs: of the training.
        batches: of an epoch, where they are limited.
        device: names of the devices, without their number.
        threads: on which one device computes, where it is a processor; None of several devices.
        budget_bytes: within which batches were to fit, where there are several budgets.
        steps: of training, in which batches were to fit, where there are several numbers of them.
        others: further overrides.
    """

    scale: str | None
    data: str
    points: int | None
    shapes: int | None
    tested: int | None
    trained: int | None
    width: float | None
    epochs: int | None
    batches: float | None
    device: str
    threads: int | None = None
    budget_bytes: float | None = None
    steps: float | None = None
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Row) -> Self:
        """The setting of a run, without its overrides."""
        names = str(row.get("hardware_devices", "")).split(", ")
        is_one_cpu = row.get("ranks") == 1 and row.get("hardware_accelerator") == "cpu"
        shapes = _whole(row.get("data.source.train_per_class"))
        return cls(
            scale=row.get("scale"),
            data=str(row.get(_OWN_TARGET, "")).rpartition(".")[2],
            points=_whole(row.get("data.num_points")),
            shapes=shapes,
            tested=_whole(row.get("data.source.test_per_class")),
            trained=_whole(row.get("train_shapes")) if shapes is None else None,
            width=row.get("model.width"),
            epochs=_whole(row.get("trainer.max_epochs")),
            batches=row.get("trainer.limit_train_batches"),
            device=", ".join(name.partition(" x ")[2] or name for name in names),
            threads=_whole(row.get("threads_per_rank")) if is_one_cpu else None,
        )

    @property
    def title(self) -> str:
        """The setting as text."""
        shapes = " + ".join(str(count) for count in (self.shapes, self.tested) if count)
        parts = [
            f"scale {self.scale}" if self.scale else "",
            self.data_text,
            f"{shapes} shapes of a class" if shapes else "",
            f"{self.trained:,} shapes" if self.trained else "",
            f"width {self.width:g}" if self.width is not None else "",
            _counted("epoch", self.epochs) if self.epochs else "",
            f"epochs limited to {_share_text(self.batches)}" if self.batches else "",
            *self.others,
            f"batches within {self.budget_bytes / 1e6:,.0f} MB" if self.budget_bytes else "",
            _steps_text(self.steps),
            self.device,
            self.threads_text,
        ]
        return "; ".join(part for part in parts if part)

    @property
    def data_text(self) -> str:
        points = "all their points" if self.points is None else f"{self.points:,} points"
        return f"{_DATA.get(self.data, (self.data,))[0]}, {points}"

    @property
    def threads_text(self) -> str:
        """Threads of a single device as text; empty where unknown."""
        return "" if self.threads is None else f"{_counted('thread', self.threads)} a device"

    @property
    def option(self) -> str:
        """The option of ``data`` with these shapes."""
        return _DATA.get(self.data, ("", USUAL))[1]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for scale and data."""
        scale = (f"scale={self.scale}",) if self.scale else ()
        return (*scale, *((f"data={self.option}",) if self.option != USUAL else ()))

    @property
    def values(self) -> dict[str, Any]:
        """Values of the configuration, by key."""
        return {key: getattr(self, name) for key, name in _OWN_KEYS.items()}

    @staticmethod
    def has(key: str) -> bool:
        return key in _OWN_KEYS


def _steps_text(steps: float | None) -> str:
    if steps is None:
        return ""
    return f"batches tried by {_counted('step', steps)}"


def _share_text(batches: float) -> str:
    """A number of batches, or as a float of at most 1 a share of an epoch."""
    if isinstance(batches, float) and batches <= 1:
        return f"{100 * batches:g} % of their batches"
    return _counted("batch", batches, several="batches")


def _counted(what: str, count: float, *, several: str = "") -> str:
    number = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{number} {what if count == 1 else several or f'{what}s'}"


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def commands_of(setting: Setting, rows: Sequence[Row], commands: Commands) -> Commands:
    """Commands whose runs belong to the setting."""
    root = () if setting.option == USUAL else (f"data.root=${setting.option.upper()}",)
    return commands.giving(
        *setting.overrides,
        *root,
        *commands.unlike(setting.overrides, setting.values),
        *setting.others,
        environment=_thread_limit(rows),
    )


def data_notes(commands: Commands) -> list[str]:
    """Instructions that come before the commands."""
    roots = [word for word in commands.given if word.startswith("data.root=$")]
    names = [word.removeprefix("data.root=$") for word in roots]
    return [
        f"In commands ${name} stands for the directory of the data: first export {name}=DIRECTORY."
        for name in names
    ]


def _thread_limit(rows: Sequence[Row]) -> tuple[str, ...]:
    """Environment variables for the number of threads; empty where a device uses all cores."""
    alone = [row for row in rows if row.get("task_name") != "fit_batch" and row.get("ranks") == 1]
    limited = [
        (row.get("threads_per_rank"), row.get("machine_cores"))
        for row in alone
        if row.get("hardware_accelerator") == "cpu"
    ]
    limits = {int(threads) for threads, cores in limited if threads and cores and threads < cores}
    return tuple(f"OMP_NUM_THREADS={limit}" for limit in sorted(limits)[:1])


CellOf = Callable[[Row], Sequence[str] | None]
"""Overrides of the cell that a run is for, beside those of its setting; None: it is for none."""
Make = Callable[[Sequence[Row], Commands, Setting | None], Block]
"""Makes a block of the runs of a setting; None: there is no run."""

TRAININGS, FITTING = ("train", "train_if_fits"), "fit_batch"
OF_TRIALS = {"task.budget_bytes": "budget_bytes", "task.steps": "steps"}
"""Conditions for a batch to fit: keys, by the attribute of the setting."""
_NOT_OF_MEMORY = frozenset({"tested", "trained", "epochs", "batches", "threads"})
"""Attributes of a setting that do not change whether a batch fits into memory."""


def blocks_of(
    rows: Sequence[Row], commands: Commands, *, cell_of: CellOf, make: Make
) -> list[Block]:
    """A block for each setting that runs have, and of missing cells where there is no run."""
    begun = [row for row in rows if row.get("first_weights")]
    fresh = [row for row in rows if not row.get("first_weights")]
    settings = settings_of(fresh, commands, cell_of=cell_of)
    made_by = {
        setting: commands_of(setting, theirs, commands) for setting, theirs in settings.items()
    }
    found = [
        _compared(make(theirs, made_by[setting], setting), setting.data)
        for setting, theirs in settings.items()
    ]
    missing = missing_commands(commands, made_by.values())
    found += [
        _compared(replace(make([], theirs, None), title=title), None)
        for title, theirs in missing.items()
    ]
    first, *others = found
    return [replace(first, notes=(*first.notes, *_left_out(begun))), *others]


def _compared(block: Block, source: str | None) -> Block:
    """The block, with accuracies compared with those on ModelNet40 unless they are of generated
    shapes, or there are none (``source`` is None).
    """
    if source not in (GENERATED, None):
        return block
    cells = [
        replace(cell, column=replace(cell.column, compare=Compare.NOT))
        if cell.column.compare is Compare.DIFFERENCE
        else cell
        for cell in block.cells
    ]
    return replace(block, cells=tuple(cells))


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
    """A run that belongs to a cell."""

    row: Row
    own: Setting
    unknown: frozenset[str]
    command: tuple[str, ...]
    matters: Matters
    composed: Composed | None

    @classmethod
    def of(cls, row: Row, commands: Commands, cell: Sequence[str] | None) -> Self | None:
        """None where the run belongs to no cell."""
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
            ()
            if commands.composed is None
            else overrides_of(row, command, commands.composed, matters)
        )
        return cls(
            row=row,
            own=replace(base, others=others, threads=None if is_fitting else base.threads),
            unknown=_unknown(row, base),
            command=command,
            matters=matters,
            composed=commands.composed,
        )

    @property
    def place(self) -> tuple[bool, int]:
        """Sort key: runs with the most known attributes first."""
        return self.row["task_name"] == FITTING, len(self.unknown)

    def new_settings(self, found: Sequence[Setting]) -> list[Setting]:
        """Settings of this run that ``found`` lacks."""
        if not self.unknown:
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
            self.composed is not None
            and is_made_by(self.row, self.command, setting.others, self.composed, self.matters)
        )

    def _is_alike(self, setting: Setting) -> bool:
        """Whether all but the overrides are the same."""
        known = {each.name for each in fields(Setting)} - self.unknown - {"others"}
        return all(getattr(setting, name) == getattr(self.own, name) for name in known)


def _unknown(row: Row, base: Setting) -> frozenset[str]:
    if row["task_name"] == FITTING:
        return _NOT_OF_MEMORY
    several = {"threads"} if row.get("ranks") != 1 else set()
    # What did not fit has not counted its shapes.
    uncounted = {"trained"} if base.shapes is None and base.trained is None else set()
    return frozenset(several | uncounted)


def _by_trial(setting: Setting, rows: Sequence[Row]) -> Iterator[tuple[Setting, list[Row]]]:
    """Splits a setting by the conditions of its batch searches, which are not compared."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["task_name"] == FITTING:
            found.setdefault(tuple(map(row.get, OF_TRIALS)), []).append(row)
    if len(found) < 2:
        yield setting, list(rows)
        return
    trials = [dict(zip(OF_TRIALS.values(), trial, strict=True)) for trial in found]
    unlike = {name for name in OF_TRIALS.values() if len({trial[name] for trial in trials}) > 1}
    for trial, searches in zip(trials, found.values(), strict=True):
        own = {name: value for name, value in trial.items() if name in unlike}
        yield (
            replace(setting, **own),
            [
                row
                for row in rows
                if row["task_name"] != FITTING or any(row is each for each in searches)
            ],
        )


def _order(setting: Setting) -> tuple[str, ...]:
    """Sort key: settings without overrides first."""
    others = "; ".join(setting.others)
    return (*(str(getattr(setting, each.name)) for each in fields(Setting)[:-1]), others)
