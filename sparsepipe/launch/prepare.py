"""A run before its ranks exist: checks, data and the run's directory."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.config.compose import refuse_printing_task
from sparsepipe.config.division import division_of
from sparsepipe.config.recomputation import is_automatic, refuse_recompute, synchronous_stages_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import LONGEST_S, MICROBATCHES_KEY, SearchChoice
from sparsepipe.config.sweep_environment import announced_threads
from sparsepipe.errors import ConfigError
from sparsepipe.partition.memory.microbatches import check_microbatches
from sparsepipe.planning.device_profiles import (
    check_devices,
    check_workload,
    fingerprint_of_profiles,
    load_profiles,
)
from sparsepipe.planning.devices import order_of_devices, places_of_ranks
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir, file_fingerprint, run_dir
from sparsepipe.tasks.emulate import as_emulated
from sparsepipe.tasks.partition import Partition
from sparsepipe.tasks.task import Task, task_class, task_of
from sparsepipe.tasks.train import Train
from sparsepipe.tracking.loggers import refuse_missing


def resolve_run(spec: RunSpec) -> tuple[RunSpec, Inventory, int]:
    """A configuration as its task runs it, the hardware, and the number of processes on that.

    Raises:
        SparsePipeError: what can be refused before anything is prepared.
    """
    refuse_printing_task(spec)
    spec = as_emulated(spec)
    refuse_search(spec)
    _refuse_timeout(spec)
    inventory = build_inventory(spec)
    task = task_of(spec)
    if spec.input is not None and not task.reads_input:
        raise ConfigError(
            f"input is set, which task={task.name} does not read",
            remedy="leave input out, or choose task=predict",
        )
    if spec.trainer.trace and isinstance(task, Train) and not spec.parallel.splits:
        raise ConfigError(
            "trainer.trace=true records the stages of a pipeline, and parallel.strategy splits no "
            "model",
            remedy="choose parallel=hete_mp, pipeline or gpipe, or leave trainer.trace out",
        )
    refuse_missing(spec.logger.values())
    spec = task.configured(spec, inventory)
    refuse_recompute(spec, inventory)
    refuse_few_microbatches(spec)
    return spec, inventory, task.num_ranks(spec, inventory)


def prepare(spec: RunSpec, inventory: Inventory) -> RunDir:
    """Prepares the data and finds the run's directory.

    Done before ranks exist, so that none of them waits for a cache to be built. What can be
    refused without data is refused first, since a cache may take hours.

    Raises:
        SparsePipeError: a device, a checkpoint, a setting of the data or the data themselves
            cannot be used.
    """
    task = task_of(spec)
    ranks = task.num_ranks(spec, inventory)
    refuse_empty_microbatches(spec, ranks=ranks)
    places = places_of_ranks(spec, inventory, ranks=ranks)
    checkpoint = task.checkpoint(spec)
    profiles = _given_profiles(spec, inventory)
    return run_dir(
        spec,
        inventory=task.hardware(inventory),
        ranks=ranks,
        order=order_of_devices(places, inventory, nodes=spec.parallel.num_nodes),
        data_fingerprint=task.prepare(spec, inventory),
        checkpoint_fingerprint=None if checkpoint is None else file_fingerprint(checkpoint),
        profiles_fingerprint=None if profiles is None else fingerprint_of_profiles(profiles),
        threads=chosen_threads(task, inventory, ranks=ranks),
    )


def _refuse_timeout(spec: RunSpec) -> None:
    timeout_s = spec.parallel.argument("timeout_s")
    if timeout_s is not None and not 0 < timeout_s <= LONGEST_S:
        raise ConfigError(
            f"parallel.strategy.timeout_s={timeout_s:g} is no time that ranks can wait",
            remedy=f"set it to seconds above 0, {LONGEST_S:g} at most",
        )


def refuse_search(spec: RunSpec) -> None:
    """Raises a ConfigError where a plan is searched for a task that runs as one process."""
    task = task_class(spec)
    if task.alone and (search := spec.search) is not None:
        own = (
            ""
            if not issubclass(task, Partition)
            else f"; task.search={search.search} is its own search"
        )
        raise ConfigError(
            f"task={task.name} runs as one process, so that parallel has no plan to search for",
            remedy=f"leave out parallel, or set parallel=single{own}",
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


_ONE_EACH = ("straight", "variance")
"""Searches for plans in which each device is a stage."""


def refuse_few_microbatches(spec: RunSpec, *, kept: Path | None = None) -> None:
    """Refuses fewer microbatches than a stage has devices, where a plan has these.

    Raises:
        ConfigError: some of these would have nothing to do; or there is no such number of parts.
    """
    synchronous = spec.parallel.synchronous
    if synchronous is not None:
        division = division_of(spec, kept=kept)
        replicas = None if division is None else division.replicas
        check_microbatches(synchronous.microbatches, replicas or (), name=MICROBATCHES_KEY)


def refuse_empty_microbatches(spec: RunSpec, *, ranks: int, kept: Path | None = None) -> None:
    """Refuses microbatches of a training of which some are empty in every step.

    Before a search has found the plan, they are refused where no plan could fill them all.

    Raises:
        ConfigError: a device of the first stage reads fewer samples than it cuts them into.
    """
    synchronous, samples = spec.parallel.synchronous, spec.data.get("batch_size")
    if synchronous is None or not isinstance(samples, int) or not _trains_on_data(spec):
        return
    is_kept = kept is not None and kept.exists()
    division = division_of(spec, kept=kept)
    search = None if is_kept else spec.search
    plan = None if division is None else division.config
    readers = int((plan or "1").split("-")[0]) if search is None else _most(search, spec, ranks)
    if synchronous.microbatches <= samples * readers:
        return
    most = "" if readers == 1 else f" on each of {readers} devices"
    raise ConfigError(
        f"data.batch_size={samples}{most} gives {samples * readers} samples, and "
        f"{MICROBATCHES_KEY}={synchronous.microbatches} are to be cut of them: some "
        "would be empty in every step",
        remedy=f"set {MICROBATCHES_KEY} to {samples * readers} or fewer "
        "(data.batch_size times the devices of the first stage), or take larger batches",
    )


def _most(search: SearchChoice, spec: RunSpec, ranks: int) -> int:
    """The most devices that the first stage of a searched plan can have."""
    if search.search in _ONE_EACH:
        return 1
    stages = synchronous_stages_of(spec.parallel, {})
    others = 0 if stages is None else max(0, stages.distinct_stages - 1)  # a device each at least
    return max(1, ranks - others)


def _trains_on_data(spec: RunSpec) -> bool:
    """Whether the task trains on the data; emulations have batches of their profiles."""
    return issubclass(task_class(spec), Train) and spec.emulation is None


def chosen_threads(task: Task, inventory: Inventory, *, ranks: int) -> str | None:
    """The user's number of threads for the identity of a run on one processor; None without one.

    None as well for tasks with a ``prepare`` of their own or with ``threads`` in ``not_identity``.
    """
    of_task = type(task).prepare is Task.prepare and "threads" not in task.not_identity
    counts = of_task and ranks == 1 and inventory.accelerator == "cpu"
    return announced_threads() if counts else None
