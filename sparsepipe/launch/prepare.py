"""From a configuration to a resolved run: its hardware, ranks, prepared data and directory."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from sparsepipe.cluster import places_for
from sparsepipe.cluster.places import places
from sparsepipe.config.build import build_inventory
from sparsepipe.config.compose import refuse_printing_task
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import LONGEST_S, MICROBATCHES_KEY
from sparsepipe.config.sweep_environment import announced_threads
from sparsepipe.errors import ConfigError
from sparsepipe.partition.memory import check_microbatches
from sparsepipe.planning.device_profiles import (
    check_measured,
    fingerprint_of_profiles,
    load_profiles,
)
from sparsepipe.planning.recomputation import recompute_of, refuse_recompute, synchronous_stages_of
from sparsepipe.runs.rundir import file_fingerprint, run_dir
from sparsepipe.tasks.emulate import as_emulated
from sparsepipe.tasks.predict import Predict
from sparsepipe.tasks.task import ResolvedRun, Task, task_of
from sparsepipe.tasks.train import Train
from sparsepipe.tracking.loggers import refuse_missing


def resolve_run(spec: RunSpec) -> ResolvedRun:
    """Resolves a configuration to its task, hardware, ranks and devices, without its directory.

    With ``hardware.emulate=true``, the configuration of the run differs from the user's: its task
    becomes ``TrainEmulated`` (:func:`sparsepipe.tasks.emulate.as_emulated`).
    """
    refuse_printing_task(spec)
    spec = as_emulated(spec)
    task, inventory = task_of(spec), build_inventory(spec)
    _refuse_settings(spec, task)
    refuse_missing(spec.logger.values())
    run = ResolvedRun.of(task.configured(spec, inventory), inventory)
    shares = isinstance(task, Predict) and run.spec.parallel.grid is not None
    if task.alone and run.ranks > 1 and not shares:
        raise ConfigError(
            f"task={task.name} runs as one process, but parallel asks for {run.ranks} ranks",
            remedy="choose parallel=single; task=partition plans for the devices of hardware",
        )
    refuse_recompute(run.spec, inventory, run.division)
    refuse_few_microbatches(run)
    return run


def _refuse_settings(spec: RunSpec, task: Task) -> None:
    """Raises a ConfigError if a setting does not suit the task."""
    timeout_s = spec.parallel.argument("timeout_s")
    if timeout_s is not None and not 0 < timeout_s <= LONGEST_S:
        raise ConfigError(
            f"parallel.strategy.timeout_s={timeout_s:g} is not a time that ranks can wait",
            remedy=f"set it to a number of seconds above 0 and up to {LONGEST_S:g}",
        )
    if task.alone and spec.search is not None:
        raise ConfigError(
            f"task={task.name} runs as one process, but parallel searches for a plan",
            remedy="leave out parallel, or set parallel=single; the search of task=partition is "
            "set as task.search",
        )
    if spec.input is not None and not isinstance(task, Predict):
        raise ConfigError(
            f"input is set, but task={task.name} does not read it",
            remedy="leave input out, or choose task=predict",
        )
    if spec.trainer.trace and isinstance(task, Train) and not spec.parallel.splits:
        raise ConfigError(
            "trainer.trace=true records the stages of a pipeline, but parallel.strategy does not "
            "split the model",
            remedy="choose parallel=hete_mp, pipeline or gpipe, or leave trainer.trace out",
        )


def prepare(run: ResolvedRun) -> ResolvedRun:
    """Prepares the data of a run and finds its directory.

    Runs before ranks join, so that none waits for a cache to be built. Settings that can be refused
    without data are refused first, since building a cache may take hours.
    """
    spec, task, inventory, division = run.spec, run.task, run.inventory, run.division
    refuse_empty_microbatches(run)
    checkpoint = task.checkpoint(spec)
    automatic, profiles = spec.parallel.recompute == "auto", None
    if spec.search is not None or automatic:  # the stages or recomputed layers depend on profiles
        model, given = spec.model, spec.given_profiles
        found = load_profiles(inventory, model.name, given=given, settings=model.settings)
        if spec.emulation is None:  # else model, data and devices are made from the profiles
            check_measured(found, spec, inventory)
        profiles = fingerprint_of_profiles(found)
    known: dict[str, Any] = {
        "ranks": run.ranks,
        "data fingerprint": task.prepare(run),
        "checkpoint": None if checkpoint is None else file_fingerprint(checkpoint),
        "hardware fingerprint": task.hardware(inventory).fingerprint(),
    }
    if division is not None:
        known["plan"] = division.arguments()  # the content of a plan file, not its path
        recompute = recompute_of(spec.parallel, division)
        if not automatic and recompute != spec.parallel.recompute:
            known["recompute"] = recompute
    # Tasks that override prepare() include the threads in its result, if at all.
    counts_threads = type(task).prepare is Task.prepare and "threads" not in task.not_identity
    on_one_processor = run.accelerator == "cpu" and run.ranks == 1
    threads = announced_threads() if counts_threads and on_one_processor else None
    if threads is not None:
        known["threads"] = threads
    nodes = spec.parallel.num_nodes
    if run.places != places_for(inventory, None, ranks=run.ranks, nodes=nodes):
        # Most runs take devices in the inventory's order; any other order gives another run id.
        known["devices"] = [places(inventory).index(place) for place in run.places]
    if run.accelerator == "cuda":
        known["matmul_precision"] = run.matmul_precision  # earlier runs had torch's own
    if run.accelerator == "cuda" and spec.backend and spec.backend.name == "AutoBackend":
        known["backend"] = "auto"  # rounds differently from the native one, which it is on a CPU
    if (search := spec.plan_search) is not None:
        known["search"] = {**asdict(search), "profiles": profiles}
    elif automatic:
        known["recompute"] = [profiles, spec.recompute_memory]
    return replace(run, found=run_dir(spec, known))


_ONE_EACH = ("straight", "variance")
"""Searches whose plans have one device in each stage."""


def refuse_few_microbatches(run: ResolvedRun) -> None:
    """Raises a ConfigError if the plan is known and a stage has more replicas than microbatches."""
    synchronous = run.spec.parallel.synchronous
    if synchronous is not None:
        replicas = None if run.division is None else run.division.replicas
        check_microbatches(synchronous.microbatches, replicas or (), name=MICROBATCHES_KEY)


def refuse_empty_microbatches(run: ResolvedRun) -> None:
    """Raises a ConfigError if a training run's batch cannot fill all microbatches.

    Before a search has found the plan, it raises only if that is so with every plan.
    """
    spec, division = run.spec, run.division
    synchronous, samples = spec.parallel.synchronous, spec.data.get("batch_size")
    on_data = isinstance(run.task, Train) and spec.emulation is None
    if synchronous is None or not isinstance(samples, int) or not on_data:
        return
    plan_is_known = division is not None and (division.file is not None or spec.search is None)
    if plan_is_known or (search := spec.search) is None:
        config = None if division is None else division.config
        readers = int((config or "1").split("-")[0])
    elif search.search in _ONE_EACH:
        readers = 1
    else:  # each further stage with recomputed layers takes at least one device
        stages = synchronous_stages_of(spec.parallel, {})
        others = 0 if stages is None else max(stages.named_stages, default=0)
        readers = max(1, run.ranks - others)
    if synchronous.microbatches <= samples * readers:
        return
    most = "" if readers == 1 else f" on each of {readers} devices"
    raise ConfigError(
        f"data.batch_size={samples}{most} is too small for "
        f"{MICROBATCHES_KEY}={synchronous.microbatches}: some would be empty in every step",
        remedy=f"set {MICROBATCHES_KEY} to {samples * readers} or fewer "
        "(data.batch_size times the devices of the first stage), or increase data.batch_size",
    )
