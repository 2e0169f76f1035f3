"""Resolved runs of configurations, their directories and their plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.launch.prepare import prepare
from sparsepipe.planning.division import division_of
from sparsepipe.planning.plan_resolution import resolve_plan
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.task import ResolvedRun


def resolved(
    spec: RunSpec, inventory: Inventory | None = None, *, directory: RunDir | None = None
) -> ResolvedRun:
    """The run of a configuration that a task has configured, if it is to do so."""
    hardware = build_inventory(spec) if inventory is None else inventory
    return ResolvedRun.of(spec, hardware, directory=directory)


def run_directory(spec: RunSpec, inventory: Inventory | None = None) -> RunDir:
    """The directory of a run whose data are prepared."""
    return prepare(resolved(spec, inventory)).directory


def plan_run(
    spec: RunSpec,
    directory: RunDir,
    inventory: Inventory | None = None,
    *,
    run_job: Callable[..., Any] | None = None,
) -> None:
    """Leaves the plan of a run in its directory."""
    hardware = build_inventory(spec) if inventory is None else inventory
    resolve_plan(spec, hardware, division_of(spec), directory, run_job=run_job)
