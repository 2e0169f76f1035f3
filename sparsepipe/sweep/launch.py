"""SparsePipe's Hydra launcher: from the overrides of a sweep's jobs to their records."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from sparsepipe.config.sweep_environment import given_overrides, sweep_directory
from sparsepipe.sweep.callbacks import expected_jobs, note_exit_code
from sparsepipe.sweep.composition import (
    ComposedJob,
    compose_job,
    refuse_within_torchrun,
    task_config,
)
from sparsepipe.sweep.record import JobRecord, SweptJob, own_texts, records_of, refusal, scored
from sparsepipe.sweep.slots import Machine, Settings, Slots
from sparsepipe.utils.process import no_garbage_collection

log = logging.getLogger(__name__)


def launch(
    config: DictConfig,
    context: HydraContext,
    overrides: Sequence[Sequence[str]],
    *,
    first: int,
    settings: Settings,
) -> list[JobReturn]:
    """Runs a job for each of ``overrides``, numbered from ``first``; returns what sweepers expect.

    The value of a returned job is its run directory, None if it did not finish. ``float`` turns
    the directory into the value of the run's objective, for sweepers that search.
    """
    refuse_within_torchrun()
    setup_globals()
    with no_garbage_collection():
        composed = [
            compose_job(context.config_loader, config, each, number=first + index)
            for index, each in enumerate(overrides)
        ]
    refused = {one.job.number: one.refused for one in composed if one.refused is not None}
    try:
        if len(refused) < len(composed):
            records = _run_jobs(config, composed, settings, context)
        else:  # without importing torch, so that a misspelt key is reported at once
            records = {
                one.job.number: refusal(one.job, refused[one.job.number]) for one in composed
            }
            for one in composed:
                returned = _returned(one, records[one.job.number])
                context.callbacks.on_job_end(config=one.whole, job_return=returned)
    except SystemExit:
        # Hydra would not call its callbacks, which log the table of the jobs so far.
        context.callbacks.on_multirun_end(config=config, config_name=config.hydra.job.config_name)
        log.warning("stopped; run the same command again to go on")
        raise
    note_exit_code([records[number] for number in sorted(records)])
    return [_returned(one, records[one.job.number]) for one in composed]


def _run_jobs(
    config: DictConfig, composed: Sequence[ComposedJob], settings: Settings, context: HydraContext
) -> dict[int, JobRecord]:
    # These import torch and Lightning, which --help and the like need not wait for.
    from sparsepipe.runtime.failures.rank_reports import Stopped
    from sparsepipe.sweep.resources import machine
    from sparsepipe.sweep.runner import Runner

    there = machine()
    leaders: list[ComposedJob] = []  # jobs that differ; ``same`` has the others
    same: dict[int, list[SweptJob]] = {}
    for one in composed:
        twins = [other for other in leaders if one.spec and other.spec == one.spec]
        if twins:
            same.setdefault(twins[0].job.number, []).append(one.job)
        else:
            leaders.append(one)
    ready, refused = _ready(leaders, there, settings)
    first = min(one.job.number for one in composed)
    earlier = [each for each in records_of(sweep_directory(config)) if each.number < first]
    jobs = [(each.number, each.overrides) for each in earlier]
    jobs += [(one.job.number, one.job.overrides) for one in composed]
    texts = own_texts([words for _, words in jobs], given=given_overrides(config))
    by_number = {one.job.number: one for one in composed}
    runner = Runner(
        Slots(machine=there, max_jobs=settings.max_jobs),
        settings=settings,
        texts={number: text for (number, _), text in zip(jobs, texts, strict=True)},
        # Calls Hydra's callbacks as if the jobs ran in this process.
        on_start=lambda job: context.callbacks.on_job_start(
            config=by_number[job.number].whole, task_function=lambda config: None
        ),
        on_end=lambda record: context.callbacks.on_job_end(
            config=by_number[record.number].whole,
            job_return=_returned(by_number[record.number], record),
        ),
        earlier=earlier,
        total=expected_jobs(config, begun=len(jobs)),
    )
    try:
        return runner.run(ready, same=same, known=refused)
    except Stopped as stop:
        sys.exit(stop.exit_code)


def _ready(
    composed: Sequence[ComposedJob], there: Machine, settings: Settings
) -> tuple[list[Any], list[JobRecord]]:
    """Jobs that can be started on the machine ``there``, and records of those that cannot."""
    from sparsepipe.sweep.resources import needs
    from sparsepipe.sweep.running_job import ReadyJob

    ready, refused = [], []
    for one in composed:
        try:
            if one.refused is not None:
                raise one.refused
            assert one.spec is not None
            needed = needs(one.spec, there, settings)
        except Exception as error:  # even of a user's code: the other jobs still run
            refused.append(refusal(one.job, error))
        else:
            env = OmegaConf.to_container(one.whole.hydra.job.env_set, resolve=True)
            assert isinstance(env, dict)
            variables = {str(name): str(value) for name, value in env.items()}
            ready.append(ReadyJob(job=one.job, spec=one.spec, demand=needed, env=variables))
    return ready, refused


def _returned(one: ComposedJob, record: JobRecord) -> JobReturn:
    # The error of a failed job is in its record; raising it would end the sweeper, and with it the
    # tables of the other jobs.
    done = JobReturn(
        overrides=list(one.job.overrides),
        cfg=task_config(one.whole),
        hydra_cfg=OmegaConf.create({"hydra": one.whole.hydra}),
        working_dir=os.getcwd(),
        task_name=str(one.whole.hydra.job.name),
        status=JobStatus.COMPLETED,
    )
    done.return_value = None if record.run is None else scored(record.run, record.value)
    return done
