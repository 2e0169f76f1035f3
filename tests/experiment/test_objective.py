"""Figures of runs that sweepers search the best of."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest
from experiment_harness import composed

from sparsepipe.errors import ConfigError
from sparsepipe.experiment.objective import scored, value_of
from sparsepipe.experiment.rundir import identity_of
from sparsepipe.results.files import write_json


@pytest.fixture
def run(tmp_path: Path) -> str:
    write_json(
        tmp_path / "result.json",
        {"test/accuracy": 0.75, "epoch_s": 3, "kind": "measured", "done": True, "none": None},
    )
    return str(tmp_path)


def test_a_run_is_its_directory_and_a_number(run: str) -> None:
    found = scored(run, "test/accuracy")
    assert found == run
    assert float(found) == 0.75
    assert float(scored(run, "epoch_s")) == 3.0
    # From one process to another.
    sent = pickle.loads(pickle.dumps(found))
    assert (sent, float(sent)) == (run, 0.75)


def test_without_an_objective_it_is_no_number(run: str) -> None:
    assert scored(run, None) == run
    with pytest.raises(ValueError, match="could not convert"):
        float(scored(run, None))


@pytest.mark.parametrize("objective", ["test/acuracy", "kind", "done", "none"])
def test_what_is_no_figure_is_told(
    run: str, objective: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=f"objective={objective} is no figure") as refused:
        value_of(run, objective)
    # The run is done all the same, and other jobs of its sweep go on.
    monkeypatch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
    found = scored(run, objective)
    assert found == run
    assert f"objective={objective} is no figure" in caplog.text
    with pytest.raises(ValueError, match="could not convert"):
        float(found)
    if objective == "test/acuracy":
        assert "(nearest: 'test/accuracy')" in refused.value.message


def test_a_run_is_the_same_whatever_is_searched() -> None:
    base = identity_of(composed())
    assert identity_of(composed("objective=epoch_s")) == base


def test_it_is_a_name() -> None:
    with pytest.raises(ConfigError, match="'objective' must be text or null, not 3"):
        composed("objective=3")
