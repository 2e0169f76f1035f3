"""What is decided of a planned run before its ranks begin: no plan, or another run's."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.errors import PlanError
from sparsepipe.launch.job import _decide
from sparsepipe.launch.prepare import prepare
from sparsepipe.runs.rundir import RunDir
from tests.support.command_line import composed
from tests.support.planned_cases import MODEL, SLOW, TWO, given, profile
from tests.support.plans import plan_on
from tests.support.resolved import resolved

pytestmark = pytest.mark.usefixtures("workplace")


def test_a_failed_search_under_torchrun_leaves_no_run(tmp_path: Path) -> None:
    none_fits = ("parallel.search.reserved_bytes=1e15", given(tmp_path, profile([1, 1, 1, 1])))
    config = composed(*MODEL, *TWO, "parallel=hete_mp", SLOW, *none_fits)
    run = prepare(resolved(config))
    with contextlib.ExitStack() as held:
        decided = _decide(run, held)
    assert isinstance(decided, PlanError)
    assert not run.directory.path.exists()


def trained(path: Path, *names: str) -> str:
    """An override that names a run with a checkpoint, whose layers lay on devices of some host."""
    run = RunDir(path)
    run.checkpoints.mkdir(parents=True)
    run.last.touch()
    plan = plan_on(*([f"once/{name}"] for name in names), strategy="exact")
    run.plan.write_text(plan.to_json())
    return f"checkpoint={run.path}"


def test_an_evaluation_splits_as_the_training_did(tmp_path: Path) -> None:
    def kept(run: str, *settings: str) -> bool:
        config = composed(*MODEL, *TWO, "parallel=hete_mp", run, *settings)
        directory = RunDir(tmp_path / f"{len(list(tmp_path.iterdir()))}")
        directory.path.mkdir()
        (own := resolved(config, directory=directory)).task.adopt_plan(own)
        told = directory.plan.exists() and directory.plan.read_text()
        assert told in (False, RunDir(Path(run.partition("=")[2])).plan.read_text())
        return bool(told)

    device = build_inventory(composed(*MODEL, *TWO)).hosts[0].devices[0].name
    two = trained(tmp_path / "two", f"{device}/1", f"{device}/0")
    assert kept(two, "task=evaluate")
    assert not kept(two), "a training finds its own"
    assert not kept(two, "task=evaluate", "hardware.cpu_devices=3")
    others = trained(tmp_path / "others", "H200/0", "H200/1")
    assert not kept(others, "task=evaluate")
