"""Fewer microbatches than a stage has devices: refused before ranks, or data, are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.launch.prepare import refuse_few_microbatches, resolve_run
from tests.support.command_line import composed
from tests.support.plans import plan_on
from tests.support.simulated_cases import BY_HAND, run

pytestmark = pytest.mark.usefixtures("workplace")
ON = ("experiment=tiny", "hardware=cores")
PARTS = "parallel.strategy.microbatches"


@pytest.mark.parametrize("parallel", ["gpipe", "sync_1f1b", "eager_1f1b"])
@pytest.mark.parametrize(
    ("plan", "most", "stage"),
    [
        (("parallel.plan.config=1-3-2",), 3, 1),
        (("parallel.plan.config=3-1", "parallel.plan.cuts=[2]"), 3, 0),
        (("parallel.plan.config=4",), 4, 0),
    ],
)
def test_a_plan_by_hand(parallel: str, plan: tuple[str, ...], most: int, stage: int) -> None:
    def asked(count: int) -> int:
        return resolve_run(composed(*ON, f"parallel={parallel}", *plan, f"{PARTS}={count}"))[2]

    with pytest.raises(ConfigError) as refused:
        asked(most - 1)
    told = f"{PARTS}={most - 1} are fewer than the {most} devices of stage {stage}"
    assert refused.value.message.startswith(told)
    assert f"set {PARTS} to {most} or more" in refused.value.remedy
    assert asked(most) >= most


def test_a_plan_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_on(["test/core/0", "test/core/1"]).to_json())
    given = (*ON, "parallel=gpipe", f"parallel.plan.file={tmp_path / 'plan.json'}")
    with pytest.raises(ConfigError, match="fewer than the 2 devices of stage 0"):
        resolve_run(composed(*given, f"{PARTS}=1"))
    assert resolve_run(composed(*given, f"{PARTS}=2"))[2] == 2


def test_no_number_of_parts() -> None:
    with pytest.raises(ConfigError, match=f"^{PARTS}=0 is no number of parts"):
        resolve_run(composed(*ON, "parallel=gpipe", f"{PARTS}=0"))


def test_who_has_none_is_not_asked() -> None:
    for parallel in ("pipeline", "hete_mp"):
        plan = (f"parallel={parallel}", "parallel.plan.config=5-1")
        assert resolve_run(composed(*ON, *plan))[2] == 6


def test_a_plan_that_a_search_has_found(tmp_path: Path) -> None:
    """As one that does not look at it, ``mp`` by levels: refused before ranks start."""
    config = composed(*ON, "parallel=gpipe", f"{PARTS}=1", "parallel.search.search=mp")
    refuse_few_microbatches(config, kept=tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text(plan_on(["test/core/0", "test/core/1"]).to_json())
    with pytest.raises(ConfigError, match=rf"^{PARTS}=1 are fewer than the 2 devices of stage 0"):
        refuse_few_microbatches(config, kept=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("told", "option"),
    [
        ((*BY_HAND, "task.schedule=1f1b", "task.microbatches=3"), "task.microbatches"),
        ((*BY_HAND, "parallel=gpipe", f"{PARTS}=3"), PARTS),
    ],
)
def test_simulations_are_refused_as_trainings_are(
    tmp_path: Path, told: tuple[str, ...], option: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{option}=3 are fewer than the 4 devices of stage 0"):
        run(tmp_path, *told)
