"""What is settled before ranks exist: the checkpoint, the data, the run's directory."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import ready_data
from sparsepipe.config.recomputation import is_automatic
from sparsepipe.config.run_spec import RunSpec
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


def prepare(spec: RunSpec, inventory: Inventory) -> RunDir:
    """Prepares the data and finds the run's directory.

    Done before ranks exist, so that none of them waits for a cache to be built. What can be
    refused without data is refused first, since a cache may take hours.

    Raises:
        SparsePipeError: a device, a checkpoint, a setting of the data or the data themselves
            cannot be used.
    """
    ranks = num_ranks(spec, inventory)
    refuse_empty_microbatches(spec, ranks=ranks)
    places = places_of_ranks(spec, inventory, ranks=ranks)
    checkpoint = _checkpoint(spec)
    profiles = _given_profiles(spec, inventory)
    prepare_task = getattr(spec.task.locate(), "prepare", _prepare_data)
    return run_dir(
        spec,
        inventory=inventory,
        ranks=ranks,
        order=order_of_devices(places, inventory, nodes=spec.parallel.num_nodes),
        data_fingerprint=prepare_task(spec, inventory),
        checkpoint_fingerprint=None if checkpoint is None else file_fingerprint(checkpoint),
        profiles_fingerprint=None if profiles is None else fingerprint_of_profiles(profiles),
        threads=chosen_threads(spec, inventory, ranks=ranks),
    )


def refuse_search(spec: RunSpec) -> None:
    """Refuses to search for the plan of a task that splits nothing.

    A task that runs as one process says so as ``alone``.

    Raises:
        ConfigError: the task runs as one process.
    """
    task = spec.task.locate()
    if getattr(task, "alone", False) and (search := spec.search) is not None:
        asked = "" if task is not partition else f"; task.search={search.search} is its own search"
        raise ConfigError(
            f"task={task.__name__} runs as one process, so that parallel has no plan to search for",
            remedy=f"leave out parallel, or set parallel=single{asked}",
        )


def _given_profiles(spec: RunSpec, inventory: Inventory) -> dict[str, Profile] | None:
    parallel = spec.parallel
    if spec.search is None and not is_automatic(parallel):
        return None
    profiles = load_profiles(
        inventory,
        spec.model.name,
        given=spec.given_profiles,
        settings=spec.model.settings,
    )
    if spec.emulation is None:  # else the profiles say what is trained, and on what
        check_workload(profiles, spec)
        check_devices(profiles, spec, inventory)
    return profiles


def _prepare_data(spec: RunSpec, inventory: Inventory) -> str:
    """What the data hold, made ready. A task's own ``prepare`` takes its place."""
    del inventory
    return ready_data(spec)


def _checkpoint(spec: RunSpec) -> Path | None:
    if spec.task.locate() is evaluate:
        return checkpoint_to_evaluate(spec)
    named = spec.checkpoint
    return None if named is None else find_checkpoint(named)
