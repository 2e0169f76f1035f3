"""What a configuration means on the hardware at hand, before anything is prepared for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.config.recomputation import refuse_recompute
from sparsepipe.config.signature import locate
from sparsepipe.config.suggestions import refuse_run
from sparsepipe.launch.prepare import refuse_search
from sparsepipe.launch.samples_to_cut import refuse_few_microbatches
from sparsepipe.tasks.emulation_request import as_emulated
from sparsepipe.tasks.run import num_ranks


def understood(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Inventory, int]:
    """A configuration as its task runs it, the hardware, and the number of processes on that.

    Args:
        config: resolved and checked; one that has been through here stays as it is.

    Raises:
        SparsePipeError: what can be refused before anything is prepared.
    """
    refuse_run(config)
    config = as_emulated(config)
    refuse_search(config)
    inventory = build_inventory(config)
    config = _as_task_runs(config, inventory)
    refuse_recompute(config, inventory)
    refuse_few_microbatches(config)
    return config, inventory, num_ranks(config, inventory)


def _as_task_runs(config: Mapping[str, Any], inventory: Inventory) -> Mapping[str, Any]:
    """The configuration with a task's own ``parallel`` where it has one."""
    choose = getattr(locate(config["task"]["_target_"]), "parallel", None)
    return config if choose is None else {**config, "parallel": choose(config, inventory)}
