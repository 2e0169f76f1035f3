"""The base class of tasks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.tasks.evaluate import Evaluate
from sparsepipe.tasks.task import ResolvedRun, Task, task_of
from tests.support.command_line import composed


@dataclass(frozen=True, slots=True, kw_only=True)
class CountLayers(Task):
    """Needs nothing but ``run``."""

    most: int = 3

    def run(self, run: ResolvedRun) -> None:
        """Nothing."""


def test_its_settings_are_the_keys_of_the_group() -> None:
    spec = composed("data=shapes").replace(task={"_target_": f"{__name__}.CountLayers", "most": 5})
    assert task_of(spec) == CountLayers(most=5)
    assert task_of(composed("task=evaluate", "task.gallery=2")) == Evaluate(gallery=2)


def test_something_else_is_refused() -> None:
    spec = composed("data=shapes").replace(task={"_target_": "fractions.Fraction"})
    with pytest.raises(ConfigError, match=r"fractions\.Fraction is not a task") as caught:
        task_of(spec)
    assert "sparsepipe.tasks.task.Task" in caught.value.remedy
