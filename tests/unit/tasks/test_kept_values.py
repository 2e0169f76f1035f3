"""When a training tells what it keeps, and when it says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.tasks.kept_memory import kept_values
from sparsepipe.tasks.task import Run
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed
from tests.support.planned_cases import profile

Job = Callable[..., Path]
WORDS = "kept_bytes is left out"


def counted(layers: int = 4, **meta: Any) -> Profile:
    """Of the tiny network on its batches, with the bytes that its layers save."""
    found = profile([1.0] * layers)
    saving = [
        replace(layer, saved_bytes=800.0, begin_bytes=0.0, end_bytes=0.0) for layer in found.layers
    ]
    return Profile(layers=tuple(saving), meta={**found.meta, "batch_size": 4, **meta})


def on(path: Path | None) -> tuple[str, ...]:
    """One device, whose profile is there."""
    known = "" if path is None else f", profile: {{mlp: {path}}}"
    device = f"{{name: core, count: 1, accelerator: cpu{known}}}"
    hosts = f"hardware.value.hosts=[{{name: here, devices: [{device}]}}]"
    return ("hardware=cores", hosts, "trainer.max_epochs=1")


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
def test_parameters_momentum_and_what_layers_save(
    strategy: str, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted().save(tmp_path / "mine.json")
    with caplog.at_level("INFO"):
        told = read_json(job(f"parallel={strategy}", *on(tmp_path / "mine.json")) / "result.json")
    assert told["kept_bytes"] == told["kept_bytes_of_device"] == 4 * (2 * 1000 + 800)
    assert WORDS not in caplog.text


def test_no_error_about_what_was_kept_ends_a_run(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a plan file whose layers are others than those that it has recomputed."""
    counted().save(tmp_path / "mine.json")
    settings = ("parallel=gpipe", "parallel.strategy.recompute=all", *on(tmp_path / "mine.json"))
    directory = RunDir(job(*settings))
    assert read_json(directory.result)["kept_bytes"] > 0
    plan = read_json(directory.plan)
    directory.plan.write_text(json.dumps({**plan, "recomputed": [[0, 9]]}))
    config = composed("experiment=tiny", *settings)
    inventory, watch = build_inventory(config), SignalWatch()
    run = Run(spec=config, directory=directory, inventory=inventory, watch=watch)
    with caplog.at_level("INFO"):
        assert kept_values(run) == {}
    assert "layer 9 is not among" in caplog.text
    assert WORDS in caplog.text


@pytest.mark.parametrize("known", [None, counted(batch_size=8)])
def test_without_a_profile_of_its_batches_nothing_is_said(
    known: Profile | None, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = None
    if known is not None:
        path = tmp_path / "mine.json"
        known.save(path)
    with caplog.at_level("INFO"):
        told = read_json(job("parallel=single", *on(path)) / "result.json")
    assert "kept_bytes" not in told
    assert WORDS not in caplog.text


@pytest.mark.parametrize(
    ("strategy", "known", "why"),
    [
        ("pipeline", counted(layers=3), "the plan covers 4 layers, the profiles have 3"),
        ("single", counted(model_settings={"width": 5}), "is a profile of mlp with width=5"),
        ("single", None, "none.json"),
    ],
)
def test_a_profile_that_cannot_be_counted_by_is_named(
    strategy: str,
    known: Profile | None,
    why: str,
    job: Job,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / ("none.json" if known is None else "mine.json")
    if known is not None:
        known.save(path)
    with caplog.at_level("INFO"):
        told = read_json(job(f"parallel={strategy}", *on(path)) / "result.json")
    assert "kept_bytes" not in told
    (said,) = [message for message in caplog.messages if WORDS in message]
    assert why in said
