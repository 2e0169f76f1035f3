"""What a configuration means on the hardware at hand, before anything is prepared for it."""

from __future__ import annotations

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.config.recomputation import refuse_recompute
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.suggestions import refuse_run
from sparsepipe.launch.prepare import refuse_search
from sparsepipe.launch.samples_to_cut import refuse_few_microbatches
from sparsepipe.tasks.emulation_request import as_emulated
from sparsepipe.tasks.run import num_ranks


def understood(spec: RunSpec) -> tuple[RunSpec, Inventory, int]:
    """A configuration as its task runs it, the hardware, and the number of processes on that.

    Args:
        spec: the configuration.

    Raises:
        SparsePipeError: what can be refused before anything is prepared.
    """
    refuse_run(spec)
    spec = as_emulated(spec)
    refuse_search(spec)
    inventory = build_inventory(spec)
    spec = _as_task_runs(spec, inventory)
    refuse_recompute(spec, inventory)
    refuse_few_microbatches(spec)
    return spec, inventory, num_ranks(spec, inventory)


def _as_task_runs(spec: RunSpec, inventory: Inventory) -> RunSpec:
    """The configuration with a task's own ``parallel`` where it has one."""
    choose = getattr(spec.task.locate(), "parallel", None)
    return spec if choose is None else choose(spec, inventory)
