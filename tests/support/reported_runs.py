"""Finished runs for reports, without running anything."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from sparsepipe.config import compose
from sparsepipe.config.run_spec import flatten
from sparsepipe.tasks.task import task_of
from sparsepipe.utils.files import write_json, write_text_atomic
from tests.support.command_line import composed

SHAPES = "sparsepipe.data.sources.GeneratedShapes"


def leave(outputs: Path, run_id: str, *, name: str, **values: Any) -> None:
    """A finished run."""
    path = outputs / name / run_id
    result = {"run_id": run_id, "name": name, "kind": "measured", "seed": 0, "ranks": 1, **values}
    write_text_atomic(path / "config.yaml", "{}\n")
    write_json(path / "result.json", result)
    write_json(path / "DONE.json", {"run_id": run_id, "time": 0.0})


def leave_training(
    outputs: Path, run_id: str, *, name: str = "table2", test: float = 0.8, **more: Any
) -> None:
    values = {
        "task_name": "train",
        "study.exhibit": "table2",
        "study.cell.devices": 1,
        "study.cell.network": "sparse",
        "study.cell.resolution": 32,
        "study.cell.point_ratio": 1.0,
        "representation": "sparse",
        "data.source._target_": SHAPES,
        "data.num_points": 4096,
        "data.resolution": 32,
        "data.point_ratio": 1.0,
        "hardware_devices": "2 x Xeon",
        "hardware_accelerator": "cpu",
        "test/accuracy": test,
        "epoch_time_s": 2.0,
        "train_shapes_per_s": 100.0,
        **more,
    }
    leave(outputs, run_id, name=name, **values)


def made_by(*overrides: str, **figures: Any) -> dict[str, Any]:
    """The result of a run by a command: all of its configuration, and figures of any task."""
    config = composed(*overrides)
    dropped = ("checkpoint", "force", "logger", "paths")
    values = config.to_dict()
    settings = flatten({key: item for key, item in values.items() if key not in dropped})
    strategy = config.parallel.strategy
    words = [word.lstrip("+") for word in overrides]
    chosen = [word.partition("=")[::2] for word in words if "." not in word.partition("=")[0]]
    return {
        "hydra.overrides": words,
        **{f"hydra.choices.{group}": option for group, option in chosen},
        "run_id": "made",
        "kind": "measured",
        "task_name": task_of(config).name,
        "ranks": 1 if strategy is None else config.parallel.devices,
        "hardware_devices": "4 x RTX 2080 Ti",
        "hardware_accelerator": "cuda",
        "test/accuracy": 0.8,
        "train_shapes_per_s": 100.0,
        "largest_batch": 8,
        "limited_by": "over_budget",
        **{key: item for key, item in settings.items() if item is not None},
        **figures,
    }


def batch_of(*words: str) -> list[list[str]]:
    """Overrides of each job that a command of a sweep makes, in order."""
    asked = [word for word in words if word != "-m"]
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        experiment = [word for word in asked if word.startswith("experiment=")]
        config = hydra_compose("config", experiment, return_hydra_config=True)
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *compose.admit(asked)])
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return batch


def jobs_of(words: list[str]) -> set[frozenset[str]]:
    return {frozenset(word.lstrip("+") for word in job) for job in batch_of(*words)}


def leave_curves(
    path: Path, result: Mapping[str, Any], accuracies: Sequence[float], *, done: bool = True
) -> None:
    """A training as the scripts of studies read it, with its validation accuracy by epoch."""
    write_json(path / "result.json", dict(result))
    with (path / "metrics.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["epoch", "step", "time/epoch_s", "train/loss", "val/accuracy"])
        writer.writerows([n, n, 10, 3 - n, each] for n, each in enumerate(accuracies))
    if done:
        (path / "DONE.json").write_text("{}")


def drawn(outputs: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Result of a study's script on the runs in ``outputs``."""
    words = [sys.executable, str(script), *arguments]
    env = {**os.environ, "SPARSEPIPE_OUTPUTS": str(outputs)}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env)
