"""What of a search, of profiles and of a training makes a run another one, and what follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_harness import SUPPORT, composed
from planned_cases import MODEL, SLOW, TWO, given, profile

from sparsepipe.experiment.build import build_inventory
from sparsepipe.experiment.measuring import profile_config
from sparsepipe.experiment.planned import search_of
from sparsepipe.experiment.prepare import prepare
from sparsepipe.experiment.schema import Measuring
from sparsepipe.experiment.search import memory_model


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))  # for ranks
    monkeypatch.chdir(tmp_path)


def test_what_matters_to_a_profile_is_its_identity() -> None:
    def identity(*settings: str, how: Measuring | None = None) -> str:
        config = composed(*MODEL, *TWO, *settings)
        wanted = profile_config(config, "core", how or Measuring())
        return prepare(wanted, build_inventory(wanted)).run_id

    base = identity("parallel=hete_mp")
    other = ("seed=3", "optim=adamw", "trainer.max_epochs=9", "name=other", "force=true")
    assert identity("parallel=exact", SLOW, *other, "logger=wandb_offline") == base
    assert identity("parallel=hete_mp", "data.batch_size=8") != base
    assert identity("parallel=hete_mp", "model.width=32") != base
    assert identity("parallel=hete_mp", "hardware.cpu_devices=3") != base
    assert identity("parallel=hete_mp", how=Measuring(num_measured=7)) != base


def test_profiles_that_are_given_count_by_what_they_hold(tmp_path: Path) -> None:
    def identity(*settings: str) -> str:
        config = composed(*MODEL, *TWO, "parallel=hete_mp", SLOW, *settings)
        return prepare(config, build_inventory(config)).run_id

    base = identity(given(tmp_path, profile([1, 1, 1, 1])))
    assert identity(given(tmp_path, profile([1, 1, 1, 1]), "elsewhere.json")) == base
    assert identity(given(tmp_path, profile([1, 1, 1, 2]))) != base
    assert identity() != base
    same = given(tmp_path, profile([1, 1, 1, 1]))
    assert identity(same, "parallel.search.reserved_bytes=1") != base
    assert identity(same, "parallel.devices=2") == base


def test_a_plan_by_hand_takes_the_place_of_the_search() -> None:
    def identity(*settings: str) -> str:
        config = composed(*MODEL, *TWO, *settings, "parallel.plan.config=1-1")
        assert search_of(config) is None
        return prepare(config, build_inventory(config)).run_id

    assert identity("parallel=hete_mp") == identity("parallel=mp") == identity("parallel=pipeline")


def test_memory_follows_the_training() -> None:
    def room(*settings: str) -> tuple[bool, float] | None:
        config = composed(*MODEL, "parallel=hete_mp", *settings)
        choice = search_of(config)
        assert choice is not None
        model = memory_model(choice, config)
        return None if model is None else (model.stash, model.optimizer)

    assert room() == (True, 1.0)
    assert room("parallel.strategy.mode=none", "optim=adamw") == (False, 2.0)
    assert room("optim.optimizer.momentum=0") == (True, 0.0)
    assert room("parallel.search.stash=false", "parallel.search.optimizer_bytes=5") == (False, 5.0)
    assert room("parallel.search.memory=false") is None
