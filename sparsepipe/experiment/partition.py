"""The task ``partition``: which device should compute which layers, and what to expect of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError
from sparsepipe.experiment.device_profiles import fingerprint_of, load_profiles, origin_of
from sparsepipe.experiment.model_names import model_name
from sparsepipe.experiment.result import write_result
from sparsepipe.experiment.run import Run
from sparsepipe.partition import searches
from sparsepipe.partition.cost import cost_model as find_cost_model
from sparsepipe.partition.explain import Explanation, as_plan, explain
from sparsepipe.partition.levels import mp_by_levels
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.problem import Problem, Solution
from sparsepipe.results.files import write_text_atomic
from sparsepipe.results.tables import markdown_table, write_csv

log = logging.getLogger(__name__)

Search = Literal["dp", "mp", "hete_mp", "exact", "exhaustive"]


def partition(
    run: Run,
    *,
    search: Search = "hete_mp",
    cost_model: str = "sparsepipe_hete",
    order: str | list[str] = "by_count",
    device: str | None = None,
    levels: bool = False,
    bandwidth_bytes_per_s: float | None = None,
    profiles: dict[str, str] | None = None,
    memory: bool = True,
    stash: bool = True,
    optimizer_bytes: float = 1.0,
    reserved_bytes: float = 0.0,
) -> None:
    """Finds the best plan for the model on the hardware, prints it and writes ``plan.json``.

    Args:
        run: configuration and directory.
        search: ``dp``, ``mp``, ``hete_mp``, ``exact`` or ``exhaustive``.
        cost_model: what stages and transfers cost, see :mod:`sparsepipe.partition.cost`.
        order: in which ``hete_mp`` takes devices.
        device: whose profile counts for all devices in ``mp``; None where there is one kind.
        levels: ``mp`` partitions inside hosts first, then over hosts.
        bandwidth_bytes_per_s: one for all links; None: those of the inventory.
        profiles: files by the names of devices, in place of those that the inventory names.
        memory: whether the memory of devices rules plans out.
        stash: weights are stashed, a version for each minibatch in flight.
        optimizer_bytes: of optimizer state for each byte of parameters.
        reserved_bytes: of each device, for what else needs memory.

    Raises:
        ConfigError: a setting does not suit the search.
        ProfileError: a profile is missing, broken or of another model.
        HardwareError: a link has no bandwidth.
        PlanError: no plan fits the memory.
    """
    run.assert_one_rank()
    room = MemoryModel(stash=stash, optimizer=optimizer_bytes, reserved_bytes=reserved_bytes)
    measured = load_profiles(run.inventory, model_name(run.config), given=profiles or {})
    problem = Problem.of(
        run.inventory,
        measured,
        model=find_cost_model(cost_model),
        memory=room if memory else None,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    solution = solve(problem, search, order=order, device=device, levels=levels)
    told = explain(problem, solution)
    plan = as_plan(
        problem,
        told,
        model=model_name(run.config),
        search=search,
        device=device,
        levels=levels,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        memory=asdict(room) if memory else None,
        inventory=_told_of(run.inventory),
        profiles={name: origin_of(measured[name]) for name in sorted(measured)},
    )
    table = plan_table(told)
    log.info("%s", table)
    write_text_atomic(run.directory.plan, plan.to_json())
    write_text_atomic(run.directory.path / "plan.txt", table + "\n")
    write_csv(run.directory.path / "plan.csv", [asdict(row) for row in told.rows])
    write_result(
        run,
        {
            "kind": "simulated",
            "plan_config": plan.config,
            "plan_cuts": list(plan.cuts),
            "bottleneck_s": told.bottleneck_s,
            "bottleneck": told.limit,
            "dp_s": told.dp_s,
        },
    )


def fingerprint(config: Mapping[str, Any], inventory: Inventory) -> str:
    """Of the profiles that a configuration names."""
    given = config["task"].get("profiles") or {}
    return fingerprint_of(inventory, model_name(config), given=given)


def _told_of(inventory: Inventory) -> dict[str, Any]:
    counts = {
        f"{host.name}/{device.name}": device.count
        for host in inventory.hosts
        for device in host.devices
    }
    return {"fingerprint": inventory.fingerprint(), "devices": counts}


partition.prepare = fingerprint  # type: ignore[attr-defined]


def solve(
    problem: Problem,
    search: Search,
    *,
    order: str | Sequence[str] = "by_count",
    device: str | None = None,
    levels: bool = False,
) -> Solution:
    """What a search by its name finds.

    Args:
        problem: what to partition.
        search: its name.
        order: for ``hete_mp``.
        device: for ``mp``.
        levels: for ``mp``.

    Raises:
        ConfigError: there is no such search, it does not use a setting that is given, or ``mp``
            is to take unlike devices for one kind and nobody says which.
        PlanError: no plan fits the memory.
    """
    given = {
        "order": order != "by_count" and search != "hete_mp",
        "device": device is not None and search != "mp",
        "levels": levels and search != "mp",
    }
    if unused := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"the search {search} does not use {', '.join(unused)}",
            remedy="leave out "
            + ", ".join(f"task.{name}" for name in unused)
            + "; hete_mp uses order, mp device and levels",
        )
    if search == "hete_mp":
        return searches.hete_mp(problem, order=order)
    if search == "mp":
        names = list(dict.fromkeys(kind.name for kind in problem.fleet.kinds))
        if device is None and len(names) > 1:
            raise ConfigError(
                f"mp takes all devices for alike, and there are {', '.join(names)}",
                remedy="say whose profile counts, as task.device='...'; or use hete_mp or exact",
            )
        return (mp_by_levels if levels else searches.mp)(problem, device=device or names[0])
    found = {"dp": searches.dp, "exact": searches.exact, "exhaustive": searches.exhaustive}
    if search not in found:
        raise ConfigError(
            f"there is no search {search!r}", remedy="use dp, mp, hete_mp, exact or exhaustive"
        )
    return found[search](problem)


def plan_table(told: Explanation) -> str:
    """The plan in words and figures."""
    rows = [
        (
            f"{row.stage}",
            f"{row.first}-{row.last}",
            row.devices,
            f"{1e3 * row.compute_s:.1f}",
            f"{1e3 * row.sync_s:.1f}",
            f"{1e3 * row.transfer_s:.1f}",
            "" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:,.0f}",
            f"{row.utilisation:.0%}",
        )
        for row in told.rows
    ]
    head = (
        "stage",
        "layers",
        "devices",
        "compute ms",
        "all-reduce ms",
        "transfer ms",
        "memory MiB",
        "busy",
    )
    rate = f"{1e3 * told.bottleneck_s:.1f} ms a minibatch, limited by {told.limit}"
    solution = told.solution
    order = f", devices in the order {', '.join(solution.order)}" if solution.order else ""
    return "\n".join(
        [
            f"{solution.strategy}: {solution.config}{order}",
            markdown_table(head, rows),
            f"{rate}; {told.verdict()}",
        ]
    )
