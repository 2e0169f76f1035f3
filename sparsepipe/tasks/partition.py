"""The task ``partition``: which device should compute which layers, and what to expect of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from sparsepipe.cluster.inventory import joined_where_missing
from sparsepipe.config.schema import Search, SearchChoice
from sparsepipe.planning.device_profiles import (
    fingerprint_of,
    load_profiles,
    other_workloads,
    remedy_by_measured,
)
from sparsepipe.planning.search import Found, find_plan, plan_table
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(Task):
    """Finds the best plan for the model on the hardware, prints, writes and draws it.

    What a synchronous pipeline recomputes (``parallel.strategy.recompute``) counts.
    The settings are those of :class:`~sparsepipe.config.schema.SearchChoice`.
    """

    alone: ClassVar[bool] = True
    cores: ClassVar[int | None] = 1

    search: Search = "hete_mp"
    cost_model: str = "sparsepipe_hete"
    order: str | list[str] = "by_count"
    device: str | None = None
    levels: bool = False
    bandwidth_bytes_per_s: float | None = None
    profiles: dict[str, str] | None = None
    memory: bool = True
    stash: bool | None = None
    optimizer_bytes: float | None = None
    reserved_bytes: float = 0.0

    def run(self, run: ResolvedRun) -> None:
        """Searches by the profiles that there are.

        Raises:
            ConfigError: a setting does not suit the search.
            ProfileError: a profile is missing, broken or of another model.
            HardwareError: a link has no bandwidth.
            PlanError: no plan fits the memory.
        """
        choice = SearchChoice(**{entry.name: getattr(self, entry.name) for entry in fields(self)})
        found = _found(run, choice)
        log.info("%s", plan_table(found.explanation))
        found.write(run.directory)
        # The strategy is that of the plan; the task itself is one process.
        write_result(run, {"strategy": choice.search, **_values(found)})

    def prepare(self, run: ResolvedRun) -> str:
        """A fingerprint of the profiles, which it reads in place of data."""
        return fingerprint_of(
            run.inventory, run.spec.model.name, given=self.profiles or {}, spec=run.spec
        )


def _found(run: ResolvedRun, choice: SearchChoice) -> Found:
    """The best plan by the available profiles."""
    measured = load_profiles(
        run.inventory,
        run.spec.model.name,
        given=choice.profiles or {},
        settings=run.spec.model.settings,
    )
    for difference in other_workloads(measured, run.spec):
        log.info("%s: the plan is for what was measured", difference)
    joined = joined_where_missing(run.inventory, choice.bandwidth_bytes_per_s)
    with remedy_by_measured(run.spec, joined):
        return find_plan(choice, run.spec, run.inventory, measured)


def _values(found: Found) -> dict[str, Any]:
    """Expected values of a plan, by the cost model."""
    return {
        "kind": "simulated",
        "plan_config": found.plan.config,
        "plan_cuts": list(found.plan.cuts),
        "bottleneck_s": found.explanation.bottleneck_s,
        "bottleneck": found.explanation.limit,
        "dp_s": found.explanation.dp_s,
    }
