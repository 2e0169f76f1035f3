"""Trainings whose batches have fewer samples than they are to be cut into are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.errors import ConfigError
from sparsepipe.launch.prepare import prepare, refuse_empty_microbatches
from sparsepipe.planning.plan_resolution import resolve_plan
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from tests.support.command_line import composed
from tests.support.emulated_cases import hosts
from tests.support.planned_cases import MODEL, SLOW, TWO, given, profile

CUT = "parallel.strategy.microbatches="
STRAIGHT, BOTH = "parallel.plan.config=1-1", "parallel.plan.config=2"
SEARCH = "parallel.search.search="
SEARCHED = f"{SEARCH}hete_mp"
SECOND = "parallel.strategy.recompute={stages: [1]}"  # which a plan has to have


@pytest.mark.parametrize(
    ("stages", "parts", "message", "most"),
    [
        ((STRAIGHT,), 3, "data.batch_size=2 gives 2 samples", "to 2 or fewer"),
        (("parallel.plan.cuts=[2]",), 4, "data.batch_size=2 gives 2 samples", "to 2 or fewer"),
        ((), 4, "data.batch_size=2 gives 2 samples", "to 2 or fewer"),
        ((BOTH,), 5, "data.batch_size=2 on each of 2 devices gives 4 samples", "to 4 or fewer"),
        ((SEARCHED,), 5, "data.batch_size=2 on each of 2 devices gives 4 samples", "to 4 or fewer"),
        ((f"{SEARCH}straight",), 3, "data.batch_size=2 gives 2 samples", "to 2 or fewer"),
        ((f"{SEARCH}variance",), 3, "data.batch_size=2 gives 2 samples", "to 2 or fewer"),
        ((SEARCHED, SECOND), 3, "data.batch_size=2 gives 2 samples", "to 2 or fewer"),
    ],
)
def test_refused_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: tuple[str, ...],
    parts: int,
    message: str,
    most: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = composed(*MODEL, *TWO, "parallel=gpipe", *stages, f"{CUT}{parts}")
    with pytest.raises(ConfigError) as refused:
        prepare(config, build_inventory(config))
    assert message in refused.value.message
    assert f"microbatches={parts} are to be cut" in refused.value.message
    assert most in refused.value.remedy


def test_not_refused_where_all_have_samples() -> None:
    for stages, parts in ((STRAIGHT, 2), (BOTH, 4), (SEARCHED, 4)):
        asked = (*MODEL, *TWO, "parallel=sync_1f1b", stages)
        refuse_empty_microbatches(composed(*asked, f"{CUT}{parts}"), ranks=2)
        with pytest.raises(ConfigError):  # one more than that is the first that is refused
            refuse_empty_microbatches(composed(*asked, f"{CUT}{parts + 1}"), ranks=2)


def test_a_plan_that_a_search_has_found_says_how_many_devices_read(tmp_path: Path) -> None:
    config = composed(*MODEL, *TWO, "parallel=gpipe", SEARCHED, f"{CUT}4")
    kept = tmp_path / "plan.json"
    kept.write_text(Plan.of(config="2", cuts=[], num_layers=4).to_json())
    refuse_empty_microbatches(config, ranks=2, kept=kept)
    kept.write_text(Plan.of(config="1-1", cuts=[2], num_layers=4).to_json())
    with pytest.raises(ConfigError, match=r"data\.batch_size=2 gives 2 samples"):
        refuse_empty_microbatches(config, ranks=2, kept=kept)


def test_a_search_finds_a_plan_whose_microbatches_all_have_samples(tmp_path: Path) -> None:
    """On so slow a link two stages would be faster, the first of which reads two samples."""
    measured = profile([1, 1, 1, 1])
    measured = replace(measured, meta={**measured.meta, "batch_size": 2})
    asked = (*MODEL, *TWO, "parallel=gpipe", SEARCHED, SLOW, f"{CUT}4", given(tmp_path, measured))
    config, directory = composed(*asked), RunDir(tmp_path / "run")
    resolve_plan(config, build_inventory(config), directory, run_job=None)
    assert Plan.from_json(directory.plan.read_text()).config == "2"
    refuse_empty_microbatches(config, ranks=2, kept=directory.plan)


def test_what_trains_on_no_batches_of_data_is_not_refused(tmp_path: Path) -> None:
    cut = ("parallel=gpipe", STRAIGHT, f"{CUT}9", "data.batch_size=2")
    refuse_empty_microbatches(composed(*hosts(tmp_path, slow=1), *cut), ranks=2)
    refuse_empty_microbatches(composed("experiment=tiny", "task=evaluate", *TWO, *cut), ranks=2)
    with pytest.raises(ConfigError):  # what does train on them is refused for the same
        refuse_empty_microbatches(composed(*MODEL, *TWO, *cut), ranks=2)
