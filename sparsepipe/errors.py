"""The exceptions that SparsePipe raises for errors that its users can correct.

Every message says what is wrong and names the remedy, so no traceback has to be read. ``assert`` is
for invariants of SparsePipe's own code.
"""

from __future__ import annotations

from typing import ClassVar

REMEDY = "\n  remedy: "
"""Separates the message from the remedy in the text of an error."""


class SparsePipeError(Exception):
    """Base class of errors that the user can correct.

    Args:
        message: what is wrong, with the offending value.
        remedy: what to do about it, as an imperative sentence.
    """

    exit_code: ClassVar[int] = 1
    """Exit status of the command when this error ends a run."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        if not remedy:  # torch makes a loader worker's error anew, with its traceback as message
            kind = f"{type(self).__module__}.{type(self).__name__}: "
            message, _, remedy = message.rpartition(kind)[2].strip().partition(REMEDY)
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
    """No finished run was found, which need not end a report with an error."""


class CoordinateError(SparsePipeError, ValueError):
    """Voxel coordinates outside the range of a sparse tensor."""

    exit_code = 3


class HardwareError(SparsePipeError):
    """A demand that the hardware cannot meet, such as more memory, or an invalid inventory."""

    exit_code = 4


class CheckpointError(SparsePipeError):
    """A checkpoint that is missing, broken or belongs to another model."""

    exit_code = 5


class OutputError(SparsePipeError):
    """Results that cannot be written: no space, no permission, no directory."""


class BackendError(SparsePipeError):
    """A sparse backend that is missing or does not support an operation."""

    exit_code = 6


class TransportError(SparsePipeError):
    """A rank that cannot be reached or does not answer.

    Attributes:
        ranks: the ranks that are missing or do not answer; empty if unknown.
    """

    exit_code = 7
    ranks: tuple[int, ...] = ()


class DivergedError(SparsePipeError):
    """A training whose loss or weights are no longer finite, so that it has no result."""

    exit_code = 8


class PlanError(ConfigError):
    """A plan that does not fit the model's layers or the devices."""


class ProfileError(ConfigError):
    """A profile that is missing, broken or measured on another model or workload."""


class ScheduleError(SparsePipeError):
    """A schedule that is invalid, or in which ranks would wait for each other for ever."""
