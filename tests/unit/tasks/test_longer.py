"""A training with more epochs goes on from the finished run with fewer, or says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsepipe.utils.files import read_json
from tests.support.command_line import checkpoint, rows

Job = Callable[..., Path]


def figures(run: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if "time/" not in k and "_per_s" not in k}
            for row in rows(run)]  # fmt: skip


SCHEDULE = (
    "optim.schedule={_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 1}"
)


def test_it_equals_a_training_without_a_stop(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = ("model.dropout=0.5", "optim.optimizer.lr=0.1", SCHEDULE)
    whole = job(*settings, "trainer.max_epochs=4", "name=whole")
    job(*settings, "trainer.max_epochs=1")
    two = job(*settings, "trainer.max_epochs=2")
    before = (two / "metrics.csv").read_text()
    caplog.clear()
    four = job(*settings, "trainer.max_epochs=4")
    assert f"going on from {two}, which has trained 2 epochs" in caplog.text
    assert figures(four) == figures(whole)
    for name, value in checkpoint(whole)["state_dict"].items():
        assert torch.equal(checkpoint(four)["state_dict"][name], value), name
    theirs, ours = (read_json(run / "result.json") for run in (whole, four))
    for name in ("epochs", "steps", "test/loss", "best_monitored", "tested_checkpoint"):
        assert ours[name] == theirs[name], name
    assert (two / "metrics.csv").read_text() == before
    anew = job(*settings, "trainer.max_epochs=4", "force=true")
    assert (anew, figures(anew)) == (four, figures(whole))
    assert caplog.text.count("going on from") == 1


CALLBACK = "callbacks={one: {_target_: pytorch_lightning.callbacks."


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("optim=sgd_onecycle",), "spread over fewer epochs"),
        ((f"{CALLBACK}StochasticWeightAveraging, swa_lrs: 0.1}}}}",), "callbacks.one begins at"),
        ((f"{CALLBACK}EarlyStopping, monitor: val/loss, patience: 0, min_delta: 100.0}}}}",),
         "ended before its last epoch"),
    ],
    ids=["horizon", "averaging", "early stop"],
)  # fmt: skip
def test_it_says_why_it_begins_anew(
    job: Job, caplog: pytest.LogCaptureFixture, settings: tuple[str, ...], reason: str
) -> None:
    run = job(*settings, "trainer.max_epochs=3")
    caplog.clear()
    job(*settings, "trainer.max_epochs=4")
    assert f"{run} has trained" in caplog.text
    assert reason in caplog.text
    assert f"checkpoint={run} would take its weights" in caplog.text


def test_another_training_has_nothing_to_do_with_it(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job("trainer.max_epochs=1")
    caplog.set_level(logging.INFO)
    job("trainer.max_epochs=2", "seed=1")
    assert "of the same" not in caplog.text
