"""What runs of the study of depth must have in common to be in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands, word

MICROBATCHES = 32
"""T, unless something else is said."""
_KEYS = {
    "data.batch_size": "batch_size",
    "model.convolutions": "convolutions",
    "model.width": "width",
}
_SYNCHRONOUS = ("gpipe", "sync_1f1b")
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
    """

    source: str = "DrawnDigits"
    batch_size: int = 512
    convolutions: int = 22
    width: float = 1.0
    microbatches: int = MICROBATCHES
    profile: str | None = None

    @classmethod
    def of(cls, row: Row, *, microbatches: int) -> Self:
        """Of a run, in whose table T is a number."""
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
        return (
            f"{images}; {self.convolutions} convolutions{width}; minibatches of {self.batch_size} "
            f"images, T = {self.microbatches}{'' if self.profile is None else f'; {self.profile}'}"
        )

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
        return found


def settings_of(rows: Sequence[Row]) -> dict[DepthSetting, list[Row]]:
    """Runs by what they have in common.

    Those without microbatches (serial ones, and the asynchronous pipeline) belong to every T.

    Args:
        rows: of the study.
    """
    parts = sorted({int(row[_PARTS]) for row in rows if row.get(_PARTS)}) or [MICROBATCHES]
    found: dict[DepthSetting, list[Row]] = {}
    for count in parts:
        for row in rows:
            if row.get(_PARTS) in (None, count):
                found.setdefault(DepthSetting.of(row, microbatches=count), []).append(row)
    return found
