"""What a search over runs optimizes: a figure of each run's result, by the key ``objective``.

Hydra's sweepers take what a job returns. That is the run's directory; sweepers that search, as
Optuna's does, ask it for its value as a number.
"""

from __future__ import annotations

from pathlib import Path

from sparsepipe.config.check import suggest
from sparsepipe.errors import ConfigError
from sparsepipe.utils.files import read_json


class ScoredRun(str):
    """A run's directory that is also worth a number."""

    value: float

    def __new__(cls, directory: str, value: float) -> ScoredRun:
        run = super().__new__(cls, directory)
        run.value = value
        return run

    def __float__(self) -> float:
        return self.value

    def __reduce__(self) -> tuple[object, ...]:
        return ScoredRun, (str(self), self.value)  # launchers hand it from process to process


def scored(directory: str, value: float | None) -> str:
    """The directory of a finished run, worth its value where it has one."""
    return directory if value is None else ScoredRun(directory, value)


def value_of(directory: Path, objective: str | None) -> float | None:
    """A figure of a finished run's result; None where none is asked for.

    Raises:
        ConfigError: the result has no such figure.
        DataError: the result cannot be read.
    """
    if objective is None:
        return None
    result = read_json(directory / "result.json")
    figures = [key for key, value in result.items() if _is_number(value)]
    if objective not in figures:
        raise ConfigError(
            f"objective={objective} is no figure of {directory}/result.json"
            f"{suggest(objective, figures)}",
            remedy="name one of its keys that has a number, such as test/accuracy; the run is "
            "finished, and given again with another objective it is not done anew",
        )
    return float(result[objective])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
