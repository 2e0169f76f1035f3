"""The exceptions that a user of SparsePipe can meet.

Every message says what is wrong and names the remedy, so that it can be acted on
without reading a traceback. ``assert`` is kept for invariants of our own code.
"""

from __future__ import annotations

from typing import ClassVar

REMEDY = "\n  remedy: "
"""Between the message and the remedy of an error's text."""


class SparsePipeError(Exception):
    """Base class of errors that the user can mend.

    Args:
        message: what is wrong, with the offending value.
        remedy: what to do about it, as an imperative sentence.
    """

    exit_code: ClassVar[int] = 1
    """Exit status of the command when this error ends a run."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive Exception's default pickling, and
        # errors do cross process borders (loader workers, ranks).
        return _rebuild, (type(self), self.message, self.remedy), vars(self)

    def __str__(self) -> str:
        return f"{self.message}{REMEDY}{self.remedy}"


def _rebuild(kind: type[SparsePipeError], message: str, remedy: str) -> SparsePipeError:
    return kind(message, remedy=remedy)


class ConfigError(SparsePipeError, ValueError):
    """A configuration key or value that cannot be used."""

    exit_code = 2


class DataError(SparsePipeError):
    """Data that is missing, broken or cannot be cached."""

    exit_code = 3


class NoRunsError(DataError):
    """No run of the requested kind has finished, which is not always a mistake."""


class CoordinateError(SparsePipeError, ValueError):
    """Voxel coordinates outside the range of a sparse tensor."""

    exit_code = 3


class HardwareError(SparsePipeError):
    """A request that the chosen hardware inventory cannot meet, or an invalid inventory."""

    exit_code = 4


class CheckpointError(SparsePipeError):
    """A checkpoint that is missing, broken or belongs to another model."""

    exit_code = 5


class OutputError(SparsePipeError):
    """Results that cannot be written: no space, no permission, no directory."""


class BackendError(SparsePipeError):
    """A sparse backend that is missing or cannot do what it is asked to."""

    exit_code = 6


class TransportError(SparsePipeError):
    """A rank that cannot be reached or does not answer.

    Attributes:
        ranks: numbers of the missing ranks, as far as they are known.
    """

    exit_code = 7
    ranks: tuple[int, ...] = ()


class PlanError(ConfigError):
    """A plan that does not fit the model's layers or the devices."""


class ProfileError(ConfigError):
    """A profile that is missing, broken or measured on another model or workload."""


class ScheduleError(SparsePipeError):
    """A schedule that no ranks could carry out."""
