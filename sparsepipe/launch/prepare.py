"""What is settled before ranks exist: the checkpoint, the data, the run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import ready_data
from sparsepipe.config.emulation import emulation_of
from sparsepipe.config.model_names import model_name, model_settings
from sparsepipe.config.plan_search import search_of
from sparsepipe.config.recomputation import is_automatic
from sparsepipe.config.signature import locate
from sparsepipe.errors import ConfigError
from sparsepipe.launch.samples_to_cut import refuse_empty_microbatches
from sparsepipe.launch.threads import chosen_threads
from sparsepipe.planning.device_profiles import (
    check_devices,
    check_workload,
    fingerprint_of_profiles,
    load_profiles,
)
from sparsepipe.planning.placing import order_of_devices, places_of_ranks
from sparsepipe.profiling import Profile
from sparsepipe.runs.checkpoints import find_checkpoint
from sparsepipe.runs.rundir import RunDir, file_fingerprint, run_dir
from sparsepipe.tasks.evaluate import checkpoint_to_evaluate, evaluate
from sparsepipe.tasks.partition import partition
from sparsepipe.tasks.run import num_ranks


def prepare(config: Mapping[str, Any], inventory: Inventory) -> RunDir:
    """Prepares the data and finds the run's directory.

    Done before ranks exist, so that none of them waits for a cache to be built. What can be
    refused without data is refused first, since a cache may take hours.

    Raises:
        SparsePipeError: a device, a checkpoint, a setting of the data or the data themselves
            cannot be used.
    """
    ranks = num_ranks(config, inventory)
    refuse_empty_microbatches(config, ranks=ranks)
    places = places_of_ranks(config, inventory, ranks=ranks)
    checkpoint = _checkpoint(config)
    profiles = _given_profiles(config, inventory)
    prepare_task = getattr(locate(config["task"]["_target_"]), "prepare", _prepare_data)
    return run_dir(
        config,
        inventory=inventory,
        ranks=ranks,
        order=order_of_devices(places, inventory, nodes=config["parallel"]["num_nodes"]),
        data_fingerprint=prepare_task(config, inventory),
        checkpoint_fingerprint=None if checkpoint is None else file_fingerprint(checkpoint),
        profiles_fingerprint=None if profiles is None else fingerprint_of_profiles(profiles),
        threads=chosen_threads(config, inventory, ranks=ranks),
    )


def refuse_search(config: Mapping[str, Any]) -> None:
    """Refuses to search for the plan of a task that splits nothing.

    A task that runs as one process says so as ``alone``.

    Raises:
        ConfigError: the task runs as one process.
    """
    task = locate(config["task"]["_target_"])
    if getattr(task, "alone", False) and (search := search_of(config)) is not None:
        asked = "" if task is not partition else f"; task.search={search.search} is its own search"
        raise ConfigError(
            f"task={task.__name__} runs as one process, so that parallel has no plan to search for",
            remedy=f"leave out parallel, or set parallel=single{asked}",
        )


def _given_profiles(config: Mapping[str, Any], inventory: Inventory) -> dict[str, Profile] | None:
    parallel = config["parallel"]
    if search_of(config) is None and not is_automatic(parallel):
        return None
    profiles = load_profiles(
        inventory,
        model_name(config),
        given=(parallel.get("search") or {}).get("profiles") or {},
        settings=model_settings(config),
    )
    if emulation_of(config) is None:  # else the profiles say what is trained, and on what
        check_workload(profiles, config)
        check_devices(profiles, config, inventory)
    return profiles


def _prepare_data(config: Mapping[str, Any], inventory: Inventory) -> str:
    """What the data hold, made ready. A task's own ``prepare`` takes its place."""
    del inventory
    return ready_data(config)


def _checkpoint(config: Mapping[str, Any]) -> Path | None:
    if locate(config["task"]["_target_"]) is evaluate:
        return checkpoint_to_evaluate(config)
    named = config["checkpoint"]
    return None if named is None else find_checkpoint(named)
