"""Tasks under the names of the room that they were in, and the identities of their runs."""

from __future__ import annotations

import pytest

from sparsepipe.config.target import identity_name, locate
from sparsepipe.tasks.fitting.fit_batch import FitBatch
from sparsepipe.tasks.train import Train
from tests.support.command_line import composed


@pytest.mark.parametrize(
    ("former", "task"),
    [
        ("sparsepipe.experiment.train.train", Train),
        ("sparsepipe.experiment.fitting.fit_batch.fit_batch", FitBatch),
    ],
)
def test_a_former_name_means_the_present_task(former: str, task: object) -> None:
    assert locate(former) is task
    assert identity_name(f"{task.__module__}.{task.__name__}") == former


@pytest.mark.parametrize("task", ["train", "profile", "fit_batch", "simulate", "paper/table1"])
def test_identities_have_the_former_name(task: str) -> None:
    config = composed("experiment=tiny", f"task={task}", "parallel=single")
    target = config.identity()["task._target_"]
    assert target.startswith("sparsepipe.experiment.")
    assert locate(target) is config.task.locate()


@pytest.mark.parametrize("task", ["train", "emulate", "simulate"])
def test_a_configuration_by_a_former_name_is_the_present_one(task: str) -> None:
    overrides = ("experiment=tiny", f"task={task}", "parallel=single")
    present = composed(*overrides)
    former = present.identity()["task._target_"]
    assert composed(*overrides, f"task._target_={former}") == present
