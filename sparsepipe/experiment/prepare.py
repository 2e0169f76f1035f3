"""What is settled before ranks exist: the checkpoint, the data, the run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError
from sparsepipe.experiment.build import ready_data
from sparsepipe.experiment.checkpoints import find_checkpoint
from sparsepipe.experiment.device_profiles import (
    check_devices,
    check_workload,
    fingerprint_of_profiles,
    load_profiles,
)
from sparsepipe.experiment.emulation import emulation_of
from sparsepipe.experiment.evaluate import checkpoint_to_evaluate, evaluate
from sparsepipe.experiment.fitting.fit_batch import fit_batch
from sparsepipe.experiment.fitting.train_if_fits import train_if_fits
from sparsepipe.experiment.model_names import model_name, model_settings
from sparsepipe.experiment.partition import partition
from sparsepipe.experiment.placing import order_of_devices, places_of_ranks
from sparsepipe.experiment.planned import search_of
from sparsepipe.experiment.profile import profile
from sparsepipe.experiment.recomputing import is_automatic
from sparsepipe.experiment.run import num_ranks
from sparsepipe.experiment.rundir import RunDir, file_fingerprint, run_dir
from sparsepipe.experiment.samples_to_cut import refuse_empty_microbatches
from sparsepipe.experiment.signature import locate
from sparsepipe.experiment.table1 import table1
from sparsepipe.experiment.table3 import table3
from sparsepipe.experiment.threads import chosen_threads
from sparsepipe.profiling import Profile

_ALONE = (fit_batch, partition, profile, table1, table3, train_if_fits)
"""Tasks that run as one process."""


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

    Raises:
        ConfigError: the task runs as one process.
    """
    task = locate(config["task"]["_target_"])
    if task in _ALONE and (search := search_of(config)) is not None:
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
