"""A profile of the tiny network whose activations fill small devices, and plans by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.planning.division import division_of, read_plan_file
from sparsepipe.planning.recomputation import recompute_of, refuse_recompute
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from tests.support.command_line import composed
from tests.support.planned_cases import MODEL, SLOW
from tests.support.resolved import plan_run

SEARCHED = ("parallel=gpipe", "parallel.search.search=hete_mp", SLOW)
BY_HAND = ("parallel=gpipe", "parallel.plan.config=1-1", "parallel.plan.cuts=[2]")
AUTO = "parallel.strategy.recompute=auto"


def given(tmp_path: Path, *, saved_bytes: float = 1e6) -> str:
    """An override with a profile of the tiny network's four layers, the inner ones slow."""
    path = saved(tmp_path / f"{saved_bytes:g}.json", saved_bytes=saved_bytes)
    return f"parallel.search.profiles={{core: {path}}}"


def saved(
    path: Path,
    *,
    saved_bytes: float = 1e6,
    activation_bytes: float = 100,
    forward_s: Sequence[float] = (1.0, 2.0, 2.0, 1.0),
) -> Path:
    """A file with such a profile."""
    layers = [
        LayerProfile(
            index=index,
            name=str(index),
            kind="Linear",
            forward_s=seconds,
            backward_s=2 * seconds,
            activation_bytes=activation_bytes,
            parameter_bytes=1000,
            saved_bytes=saved_bytes,
            begin_bytes=0,
            end_bytes=activation_bytes,
        )
        for index, seconds in enumerate(forward_s)
    ]
    found = Profile(layers=tuple(layers), meta={"model": "mlp", "source": "a test"})
    return found.save(path)


def inventory(memory_bytes: float | None) -> Inventory:
    device: dict[str, Any] = {"name": "core", "count": 2, "accelerator": "cpu"}
    if memory_bytes is not None:
        device["memory_bytes"] = int(memory_bytes)
    return Inventory.from_dict({"hosts": [{"name": "here", "devices": [device]}]})


def settled(
    tmp_path: Path, memory_bytes: float | None, *settings: str
) -> tuple[Plan, Mapping[str, Any]]:
    """The plan that a run begins with, and what its strategy is told in place of ``auto``."""
    config, directory = composed(*MODEL, *settings), RunDir(tmp_path / "run")
    refuse_recompute(config, inventory(memory_bytes), division_of(config))
    plan_run(config, directory, inventory(memory_bytes))
    plan = Plan.from_json(directory.plan.read_text())
    found = recompute_of(config.parallel, read_plan_file(directory.plan))
    return plan, {} if found == config.parallel.recompute else {"recompute": found}
