"""The task ``partition``: which device should compute which layers, and the expected times."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import ClassVar

from sparsepipe.config.schema import Search, SearchChoice
from sparsepipe.planning.device_profiles import fingerprint_of, load_profiles, log_differences
from sparsepipe.planning.search import find_plan, plan_table
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(Task):
    """Finds the best plan for the model on the hardware; logs, writes and draws it.

    Plans' costs include recomputation by a synchronous pipeline (``parallel.strategy.recompute``).
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
        """Searches for a plan with the devices' profiles, and writes it and its expected times."""
        choice = SearchChoice(**{entry.name: getattr(self, entry.name) for entry in fields(self)})
        spec, inventory, model = run.spec, run.inventory, run.spec.model
        given = choice.profiles or {}
        measured = load_profiles(inventory, model.name, given=given, settings=model.settings)
        log_differences(measured, spec, inventory)
        found = find_plan(choice, spec, inventory, measured)
        log.info("%s", plan_table(found.explanation))
        found.write(run.directory)
        values = {
            "kind": "simulated",
            "strategy": choice.search,  # that of the plan; the task itself is one process
            "plan_config": found.plan.config,
            "plan_cuts": list(found.plan.cuts),
            "bottleneck_s": found.explanation.bottleneck_s,
            "bottleneck": found.explanation.limit,
            "dp_s": found.explanation.dp_s,
        }
        write_result(run, values)

    def prepare(self, run: ResolvedRun) -> str:
        """Returns a fingerprint of the profiles, which the search reads in place of data."""
        return fingerprint_of(
            run.inventory, run.spec.model.name, given=self.profiles or {}, spec=run.spec
        )
