"""The command ``sparsepipe``: the one Hydra entry point."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from sparsepipe import __version__
from sparsepipe.config import compose
from sparsepipe.config.completion import completion_arguments
from sparsepipe.config.listing import help_text
from sparsepipe.config.rerun import from_run, without_flag
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.scales import is_sweep
from sparsepipe.config.sweep_environment import announced
from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.runs import logs
from sparsepipe.sweep.callbacks import end_early, exit_code_of_sweep
from sparsepipe.sweep.composition import (
    refuse_several,
    refuse_unknown_keys,
    refuse_within_torchrun,
)
from sparsepipe.sweep.record import SweptJob, refusal, scored
from sparsepipe.utils.memory import no_garbage_collection

log = logging.getLogger(__name__)

FIRST = ("scale=desk", "data.source.train_per_class=50", "data.source.test_per_class=13")
"""What the command trains without any arguments: the defaults are the paper's network and epochs,
which are not for a laptop.
"""


@dataclass(slots=True)
class _Outcome:
    """Errors and exit code of the command, reported when Hydra is done."""

    errors: list[SparsePipeError] = field(default_factory=list)
    exit_code: int = 0


def main() -> None:
    """Composes the configuration and runs its task; see ``sparsepipe --help``."""
    arguments = given = sys.argv[1:]
    if "--version" in arguments:
        print(_versions())
        return
    logs.configure()
    # Hydra would print its own view of an error and exit with 1; ours is more specific.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    outcome = _Outcome()
    try:
        compose.refuse_missing_directories(arguments)
        if not arguments:
            arguments = list(FIRST)
            log.info(
                "without settings this trains sparsepipe %s, minutes on two cores; "
                "sparsepipe --help lists what there is",
                " ".join(arguments),
            )
        if {"--help", "-h"} & {*arguments}:
            own = map(Path, compose.directories_in(arguments))
            print(help_text([compose.config_dir(), *own]))
            return
        compose.refuse_unreadable(arguments)
        arguments = compose.options_first(from_run(arguments))
        compose.refuse_printed_sweep(arguments)
        sys.argv[1:] = compose.admit(completion_arguments(arguments, os.environ))
        overrides, loader = _overrides_in(arguments)
        compose.refuse_values_of_groups(overrides, loader)
        refuse_several(arguments, loader)
        if is_sweep(arguments):
            with no_garbage_collection():
                refuse_unknown_keys(compose.overrides_of(sys.argv[1:]), loader)
        _hydra_main(outcome)
        outcome.exit_code = outcome.exit_code or exit_code_of_sweep()
    except SparsePipeError as error:
        _report(error, outcome)
    except (HydraException, OmegaConfBaseException) as error:
        _report(_explained(error, arguments, given), outcome)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        outcome.exit_code = 130
    except Exception as error:
        if not end_early(error):
            raise
        outcome.exit_code = exit_code_of_sweep()
    sys.exit(outcome.exit_code)


def _hydra_main(outcome: _Outcome) -> None:
    @hydra.main(
        version_base="1.3", config_path=str(compose.config_dir()), config_name=compose.CONFIG_NAME
    )
    def sparsepipe(config: DictConfig) -> str | None:
        return _job(config, outcome)

    sparsepipe()


def _job(config: DictConfig, outcome: _Outcome) -> str | None:
    """Runs one job; its errors are kept, so that a sweep goes on with the next.

    Returns:
        The run's directory, worth its objective for sweepers that search; None where the job
        failed.
    """
    job = HydraConfig.get()
    sweep = job.mode == RunMode.MULTIRUN
    try:
        if sweep:
            refuse_within_torchrun()
        printed = None if sweep else compose.printed_text(config, job.runtime.config_sources)
        if printed is not None:
            if _is_first_rank():
                print(printed, flush=True)
            return None
        # Checked before what runs a job is imported: that takes seconds.
        with no_garbage_collection():
            swept = _swept(job) if sweep else None
            spec = compose.resolve(config) if swept is None else _resolved(swept, config)
            from sparsepipe.launch.job import Stopped, run_job

        try:
            directory = str(run_job(spec).path) if swept is None else _run_swept(swept, spec)
        except Stopped as stop:
            if _is_first_rank():
                print(f"\n{stop.message}", file=sys.stderr)
            sys.exit(stop.exit_code)
        if _is_first_rank():
            print(directory, flush=True)
        return directory
    except SparsePipeError as error:
        _report(error, outcome)
    except Exception:
        if not sweep:
            raise
        traceback.print_exc()  # the jobs before and after it count all the same
        outcome.exit_code = outcome.exit_code or 1
    return None


def _swept(hydra_config: HydraConf) -> SweptJob:
    """A job of a sweep that another launcher than ours has come to."""
    logs.configure()  # it may be another process than the sweep's
    overrides = hydra_config.overrides.task
    words = (str(word).lstrip("+") for word in overrides)  # as they were given
    log.info("job %d: %s", hydra_config.job.num + 1, " ".join(words))
    return SweptJob(
        number=int(hydra_config.job.num),
        overrides=tuple(map(str, overrides)),
        sweep=announced(str(hydra_config.sweep.dir)),
    )


def _resolved(job: SweptJob, config: DictConfig) -> RunSpec:
    """The job's configuration; where that is refused, the record says so."""
    try:
        return compose.resolve(config)
    except Exception as error:
        refusal(job, error)
        raise


def _run_swept(job: SweptJob, spec: RunSpec) -> str:
    """Runs it.

    Returns:
        The run's directory, worth its objective for sweepers that search.
    """
    from sparsepipe.sweep.job import run_swept

    done = run_swept(job, lambda: spec, fresh_processes=True)
    assert done.run is not None
    return scored(done.run, done.value)


def _report(error: SparsePipeError, outcome: _Outcome) -> None:
    # Under torchrun every rank meets the same errors, but for those that name a rank.
    ranks = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    message = f"error: {ranks}{error}"
    if "LOCAL_RANK" not in os.environ or _reports(message, sure=bool(ranks)):
        print(message, file=sys.stderr, flush=True)
    outcome.exit_code = outcome.exit_code or error.exit_code


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _reports(message: str, *, sure: bool) -> bool:
    """Whether this rank reports it: the first of all ranks, or the one that is named."""
    from sparsepipe.launch.job import first_to_report
    from sparsepipe.runs.signals import ignore

    # The agent ends all ranks as soon as one has ended: before it checks whether it is the first,
    # this one ignores that signal, since the others leave the report to it and end.
    ignore(signal.SIGTERM)
    return sure or first_to_report(message)


def _explained(error: Exception, arguments: list[str], given: list[str]) -> ConfigError:
    words: list[str] = []
    with suppress(ConfigError):  # an option that there is not is not what Hydra has refused
        words = compose.overrides_of(without_flag(given)[1])
    return compose.explain(error, *_overrides_in(arguments), words=words, command=given)


def _overrides_in(arguments: list[str]) -> tuple[list[str], ConfigLoader]:
    """The overrides of a command, and what knows the groups that they choose of."""
    overrides = [item for item in arguments if "=" in item and not item.startswith("-")]
    return overrides, compose.config_loader(compose.directories_in(arguments))


def _versions() -> str:
    """Of this package and what it computes with, none of which is imported for it."""
    python, torch = platform.python_version(), importlib.metadata.version("torch")
    return f"SparsePipe {__version__} (Python {python}, torch {torch})"


if __name__ == "__main__":
    main()
