"""What runs of the study of depth must have in common to be in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands, word
from sparsepipe.results.report.depth_overrides import sets_apart
from sparsepipe.results.report.depth_rows import asked_of
from sparsepipe.results.report.overridden import is_made_by, overrides_of

MICROBATCHES = 32
"""T, unless something else is said."""
_KEYS = {
    "data.batch_size": "batch_size",
    "model.convolutions": "convolutions",
    "model.width": "width",
}
_SYNCHRONOUS = ("gpipe", "sync_1f1b", "eager_1f1b")
_PARTS = "parallel.strategy.microbatches"
_PROFILE = "parallel.search.profiles.core"
OF_PARALLEL = (_PARTS, _PROFILE.rpartition(".")[0])
"""Keys of a setting beside those of a training."""
_SOURCES = {"Mnist": ("MNIST", ("data=mnist", "data.root=$MNIST"))}
"""Of the images: in words, and what the command line says; others are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthSetting:
    """What it is.

    Attributes:
        source: class of the images.
        batch_size: images of a minibatch.
        convolutions: of the network.
        width: of the network.
        microbatches: T.
        profile: file in place of the emulated devices' own; None: that.
        others: overrides that neither a row nor anything above tells.
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
        """Of a run, in whose table T is a number; without its overrides."""
        source = str(row.get("data.source._target_", "")).rpartition(".")[2]
        told: dict[str, Any] = {name: row[key] for key, name in _KEYS.items() if key in row}
        if row.get("kind") == "emulated":
            told["profile"] = row.get(_PROFILE)
        return cls(source=source or cls().source, microbatches=microbatches, **told)

    @property
    def title(self) -> str:
        """In words."""
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
        """(K - 1)/(T + K - 1): the share in which stages that take equally long wait (GPipe, 2.3).

        Args:
            stages: K.
        """
        return (stages - 1) / (self.microbatches + stages - 1)

    def parts_of(self, schedule: str) -> tuple[str, ...]:
        """T, where it is not as usual: of the commands of synchronous schedules, others refuse it.

        Args:
            schedule: by the option of the trial; empty of one device.
        """
        is_usual = self.microbatches == MICROBATCHES or schedule not in _SYNCHRONOUS
        return () if is_usual else (f"{_PARTS}={self.microbatches}",)

    def overrides(self, commands: Commands) -> tuple[str, ...]:
        """Of every command, where it is not as usual; see also :meth:`parts_of`."""
        words = _SOURCES.get(self.source, ("", ()))[1]
        wanted = {key: getattr(self, name) for key, name in _KEYS.items()}
        found = (*commands.given, *words, *commands.unlike(words, wanted))
        if self.profile is not None:
            found = (*found, word(_PROFILE.rpartition(".")[0], {"core": self.profile}))
        return (*found, *self.others)

    def command(self, row: Row, commands: Commands) -> tuple[str, ...]:
        """Overrides of the command of a run's cell.

        Args:
            row: of the study.
            commands: as they are for any setting.
        """
        asked = asked_of(row)
        assert asked is not None, "a run of the study"
        parts = self.parts_of(asked.schedule)
        words = (*self.overrides(commands), *asked.overrides, *parts)
        return (f"experiment={commands.experiment}", *words)


def settings_of(rows: Sequence[Row], commands: Commands) -> dict[DepthSetting, list[Row]]:
    """Runs by what they have in common.

    Those without microbatches (serial ones, and the asynchronous pipeline) belong to every T. A run
    belongs to each setting whose command for its row gives its configuration.

    Args:
        rows: of the study.
        commands: tell overrides from what is usual, if anybody knows.
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
    if commands.usual is None:
        return ()
    return overrides_of(row, bare.command(row, commands), commands.usual, sets_apart)


def _is_of(row: Row, own: DepthSetting, setting: DepthSetting, commands: Commands) -> bool:
    """Whether the command of another setting gives a run's configuration all the same."""
    bare = replace(own, others=())
    if commands.usual is None or bare != replace(setting, others=()):
        return False
    command = bare.command(row, commands)
    return is_made_by(row, command, setting.others, commands.usual, sets_apart)
