"""Runs of the study of pipeline depth: rows, settings and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sparsepipe.report.chapter import Row
from sparsepipe.report.commands import Commands
from sparsepipe.report.measurements import unlike_notes
from sparsepipe.report.overrides import (
    is_made_by,
    of_training,
    overrides_of,
    word,
)

_SCHEDULES = {
    "gpipe": "GPipe",
    "sync_1f1b": "1F1B",
    "eager_1f1b": "eager 1F1B",
    "asynchronous": "asynchronous",
}
_SERIAL = "serial"
"""The option of ``paper/schedule`` for one device."""
_PARTITIONS = {"variance": "variance", "straight": "ours"}
_TASKS = ("train", "train_emulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRow:
    """A row of the table.

    Attributes:
        depth: K.
        schedule: the option of ``paper/schedule``; ``serial`` for one device.
        partition: the search; empty for one device.
        emulated: whether it is emulated; else it is measured.
    """

    depth: int
    schedule: str = _SERIAL
    partition: str = ""
    emulated: bool

    @property
    def label(self) -> tuple[str, ...]:
        kind = "emulated" if self.emulated else "measured"
        name = _SCHEDULES.get(self.schedule, _SERIAL)
        return (str(self.depth), kind, name, _PARTITIONS.get(self.partition, "-"))

    @property
    def depth_option(self) -> str:
        """The option of ``paper/depth``; one emulated device is the same run with any of these."""
        return f"emulated_{max(self.depth, 4)}" if self.emulated else "measured_2"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the command that makes a run of the row."""
        cuts = () if self.depth == 1 else (f"paper.partition={self.partition}",)
        return (f"paper/schedule={self.schedule}", f"paper/depth={self.depth_option}", *cuts)

    @property
    def serial(self) -> DepthRow:
        """The serial row that its speedup refers to."""
        return DepthRow(depth=1, emulated=self.emulated)

    def runs(self, rows: Sequence[Row]) -> list[Row]:
        """Runs of this row, with any seed."""
        return [row for row in rows if depth_row_of(row) == self]


ROWS = tuple(
    entry
    for emulated, depths in ((False, (2,)), (True, (4, 8)))
    for entry in (
        DepthRow(depth=1, emulated=emulated),
        *(
            DepthRow(depth=depth, schedule=schedule, partition=partition, emulated=emulated)
            for depth in depths
            for schedule in _SCHEDULES
            for partition in _PARTITIONS
        ),
    )
)
"""Rows of the whole table."""


def depth_row_of(row: Row) -> DepthRow | None:
    """The row of the table that a run is of; None where it is of none.

    Runs that recompute layers are of none: they are slower and keep less.
    """
    ranks, kind = row.get("ranks"), row.get("kind")
    emulated = kind == "emulated"
    if kind not in ("measured", "emulated") or row.get("task_name") not in _TASKS:
        return None
    if row.get("recomputed_layers"):
        return None
    if row.get("strategy") == "single":
        found = DepthRow(depth=1, emulated=emulated)
    else:
        way = str(row.get("parallel.strategy._target_", "")).rpartition(".")[2]
        schedule = {None: "asynchronous", "1f1b": "sync_1f1b"}.get(
            row.get("schedule"), row.get("schedule")
        )
        if way not in ("PipelineStrategy", "SynchronousPipelineStrategy") or ranks is None:
            return None
        found = DepthRow(
            depth=int(ranks),
            schedule=str(schedule),
            partition=str(row.get("parallel.search.search")),
            emulated=emulated,
        )
    return found if found in ROWS else None


_OF_SETTING = (
    *("data.batch_size", "data.source._target_", "model.convolutions", "model.width"),
    "parallel.strategy.microbatches",
)
"""Keys that are attributes of a setting."""
_EFFORT = (
    *("data.source.test_images", "data.source.train_images", "hardware.network"),
    "hardware.value.hosts",
    *("hardware.time_scale", "trainer.limit_test_batches", "trainer.limit_train_batches"),
    *("trainer.limit_val_batches", "trainer.max_epochs"),
)
"""Keys of how a rate is measured, which differ between the depths of one table anyway."""
_STRATEGY = "parallel.strategy."
_OF_ROWS = ("parallel.strategy._target_", "parallel.strategy.process_group_backend",
            "parallel.strategy.timeout_s")  # fmt: skip
"""Keys of a strategy that follow from the row, or that change no figure."""


def sets_apart(key: str) -> bool:
    """Whether runs with another value of a key have a table of their own."""
    return of_training(key) and key not in (*_OF_SETTING, *_EFFORT)


def is_noted(key: str) -> bool:
    """Whether a note lists other values of a key: not every row has it, or it is effort."""
    of_strategy = key.startswith(_STRATEGY) and key not in (*_OF_ROWS, *_OF_SETTING)
    return key in _EFFORT or of_strategy


def override_notes(made: Sequence[tuple[Row, Sequence[str]]], commands: Commands) -> list[str]:
    """Which runs of a table are not quite what the commands of their cells give."""
    if commands.composed is None:
        return []
    found: dict[tuple[str, ...], list[str]] = {}
    for row, command in made:
        if words := overrides_of(row, command, commands.composed, is_noted):
            found.setdefault(words, []).append(str(row.get("run_id")))
    return [
        f"made with {', '.join(words)} beside the commands of their cells: {', '.join(names)}"
        for words, names in found.items()
    ]


def mean_notes(label: Sequence[str], runs: Sequence[Row]) -> list[str]:
    """Notes on a row's runs that are averaged and not alike."""
    notes = unlike_notes(runs, lambda key: sets_apart(key) or is_noted(key))
    return [f"{', '.join(label)}: {note}" for note in notes]


MICROBATCHES = 32
"""The default of T."""
_KEYS = {
    "data.batch_size": "batch_size",
    "model.convolutions": "convolutions",
    "model.width": "width",
}
_SYNCHRONOUS = ("gpipe", "sync_1f1b", "eager_1f1b")
_PARTS = "parallel.strategy.microbatches"
_PROFILE = "parallel.search.profiles.core"
_SOURCES = {"Mnist": ("MNIST", ("data=mnist", "data.root=$MNIST"))}
"""Source of the images: as text, and its overrides; other sources are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthSetting:
    """Settings that the runs of a table share.

    Attributes:
        source: class of the images.
        batch_size: images of a minibatch.
        convolutions: of the network.
        width: of the network.
        microbatches: T.
        profile: file in place of the emulated devices' own; None: that.
        others: further overrides.
    """

    source: str = "DrawnDigits"
    batch_size: int = 1024
    convolutions: int = 24
    width: float = 1.0
    microbatches: int = MICROBATCHES
    profile: str | None = None
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Row, *, microbatches: int) -> Self:
        """The setting of a run in the table with a number of microbatches, without overrides."""
        source = str(row.get("data.source._target_", "")).rpartition(".")[2]
        known: dict[str, Any] = {name: row[key] for key, name in _KEYS.items() if key in row}
        if row.get("kind") == "emulated":
            known["profile"] = row.get(_PROFILE)
        return cls(source=source or cls().source, microbatches=microbatches, **known)

    @property
    def title(self) -> str:
        """The setting as text."""
        images = _SOURCES.get(self.source, ("drawn digits", ()))[0]
        width = "" if self.width == 1 else f" of width {self.width:g}"
        parts = (
            images,
            f"{self.convolutions} convolutions{width}",
            f"minibatches of {self.batch_size} images, T = {self.microbatches}",
            *(() if self.profile is None else (self.profile,)),
            *self.others,
        )
        return "; ".join(parts)

    def ideal_bubble(self, stages: int) -> float:
        """(K - 1)/(T + K - 1): the share of the time in which equal stages wait (GPipe, 2.3)."""
        return (stages - 1) / (self.microbatches + stages - 1)

    def parts_of(self, schedule: str) -> tuple[str, ...]:
        """An unusual T, of commands with synchronous schedules; others refuse it."""
        is_usual = self.microbatches == MICROBATCHES or schedule not in _SYNCHRONOUS
        return () if is_usual else (f"{_PARTS}={self.microbatches}",)

    def overrides(self, commands: Commands) -> tuple[str, ...]:
        """Overrides of every command for settings other than the default; see :meth:`parts_of`."""
        words = _SOURCES.get(self.source, ("", ()))[1]
        expected = {key: getattr(self, name) for key, name in _KEYS.items()}
        found = (*commands.given, *words, *commands.unlike(words, expected))
        if self.profile is not None:
            found = (*found, word(_PROFILE.rpartition(".")[0], {"core": self.profile}))
        return (*found, *self.others)

    def command(self, row: Row, commands: Commands) -> tuple[str, ...]:
        """Overrides of the command of a run's cell."""
        entry = depth_row_of(row)
        assert entry is not None, "a run of the study"
        parts = self.parts_of(entry.schedule)
        words = (*self.overrides(commands), *entry.overrides, *parts)
        return (f"experiment={commands.experiment}", *words)


def settings_of(rows: Sequence[Row], commands: Commands) -> dict[DepthSetting, list[Row]]:
    """Runs by what they have in common.

    Those without microbatches (serial ones, and the asynchronous pipeline) belong to every T. A run
    belongs to each setting whose command for its row gives its configuration.
    """
    parts = sorted({int(row[_PARTS]) for row in rows if row.get(_PARTS)}) or [MICROBATCHES]
    found: dict[DepthSetting, list[Row]] = {}
    for count in parts:
        there = [row for row in rows if row.get(_PARTS) in (None, count)]
        bare = [DepthSetting.of(row, microbatches=count) for row in there]
        own = [replace(one, others=_others(row, one, commands))
               for row, one in zip(there, bare, strict=True)]  # fmt: skip
        for setting in dict.fromkeys(own):
            found[setting] = [
                row
                for row, mine in zip(there, own, strict=True)
                if mine == setting or _is_of(row, mine, setting, commands)
            ]
    return found


def _others(row: Row, bare: DepthSetting, commands: Commands) -> tuple[str, ...]:
    if commands.composed is None:
        return ()
    return overrides_of(row, bare.command(row, commands), commands.composed, sets_apart)


def _is_of(row: Row, own: DepthSetting, setting: DepthSetting, commands: Commands) -> bool:
    """Whether the command of another setting gives a run's configuration all the same."""
    bare = replace(own, others=())
    if commands.composed is None or bare != replace(setting, others=()):
        return False
    command = bare.command(row, commands)
    return is_made_by(row, command, setting.others, commands.composed, sets_apart)
