"""The command ``sparsepipe``: the one Hydra entry point."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from sparsepipe import __version__
from sparsepipe.config import compose
from sparsepipe.config.finished_run import replayed
from sparsepipe.config.listing import groups_in, help_text
from sparsepipe.config.sweep_environment import DIRECTORY
from sparsepipe.errors import SparsePipeError
from sparsepipe.runs import logs
from sparsepipe.sweep.callbacks import end_early, exit_code_of_sweep
from sparsepipe.sweep.composition import (
    refuse_several,
    refuse_unknown_keys,
    refuse_within_torchrun,
)
from sparsepipe.sweep.record import SweptJob, refusal, scored
from sparsepipe.utils.process import no_garbage_collection

log = logging.getLogger(__name__)

FIRST = ("scale=desk", "data.source.train_per_class=50", "data.source.test_per_class=13")
"""Overrides that a command without arguments uses: the defaults, the network and number of epochs
of the paper, are too much for a laptop.
"""


@dataclass(slots=True)
class _ExitState:
    """Exit code of the command: 0 until a job or an error sets another."""

    exit_code: int = 0


def main() -> None:
    """Composes the configuration from the command line, runs its task, and exits."""
    arguments = given = sys.argv[1:]
    if "--version" in arguments:
        python, torch = platform.python_version(), importlib.metadata.version("torch")
        print(f"SparsePipe {__version__} (Python {python}, torch {torch})")
        return
    if {"--help", "-h"} & {*arguments}:
        print(help_text(compose.own_directories(arguments)))
        return
    logs.configure()
    # Hydra would print its own view of an error and exit with 1; ours is more specific.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    state = _ExitState()
    try:
        if not arguments:
            arguments = list(FIRST)
            log.info(
                "without arguments, the command trains sparsepipe %s, which takes minutes on two "
                "cores; sparsepipe --help lists groups and options",
                " ".join(arguments),
            )
        groups = [group.name for group in groups_in(compose.own_directories(arguments))]
        options, arguments = compose.split_options(replayed(arguments, groups))
        admitted = compose.admit(arguments)
        sys.argv[1:] = [*options, *admitted]
        if {"-m", "--multirun", "hydra.mode=MULTIRUN"} & {*options, *arguments}:
            with no_garbage_collection():
                refuse_several(arguments, compose.config_loader(given))
                refuse_unknown_keys(admitted, compose.config_loader(given))
        _hydra_main(state)
        state.exit_code = state.exit_code or exit_code_of_sweep()
    except SparsePipeError as error:
        _report(error, state)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        state.exit_code = 130
    except Exception as error:
        if (explained := compose.explain(error, arguments, command=given)) is not None:
            _report(explained, state)
        elif end_early(error):
            state.exit_code = exit_code_of_sweep()
        else:
            raise
    sys.exit(state.exit_code)


def _hydra_main(state: _ExitState) -> None:
    @hydra.main(
        version_base="1.3", config_path=str(compose.config_dir()), config_name=compose.CONFIG_NAME
    )
    def sparsepipe(config: DictConfig) -> str | None:
        return _job(config, state)

    sparsepipe()


def _job(config: DictConfig, state: _ExitState) -> str | None:
    """Runs one job and reports its errors, so that a sweep continues with its next job.

    Returns:
        The run's directory; in a sweep with an objective, a str that also has its value.
        None if the job failed or only printed its configuration.
    """
    job = HydraConfig.get()
    sweep = job.mode == RunMode.MULTIRUN
    try:
        with no_garbage_collection():
            if sweep:
                refuse_within_torchrun()
            elif (printed := compose.printed_text(config, job.runtime.config_sources)) is not None:
                if _is_first_rank():
                    print(printed, flush=True)
                return None
            else:  # checked before the import below, which takes seconds
                spec = compose.resolve(config)
            from sparsepipe.launch.job import Stopped, run_job
        try:
            directory = _swept(job, config) if sweep else str(run_job(spec).path)
        except Stopped as stop:
            if _is_first_rank():
                print(f"\n{stop.message}", file=sys.stderr)
            sys.exit(stop.exit_code)
        if _is_first_rank():
            print(directory, flush=True)
        return directory
    except SparsePipeError as error:
        _report(error, state)
    except Exception:
        if not sweep:
            raise
        traceback.print_exc()  # the sweep goes on with its other jobs
        state.exit_code = state.exit_code or 1
    return None


def _swept(hydra_config: HydraConf, config: DictConfig) -> str:
    """Runs and records a job of a sweep that a launcher other than SparsePipe's has started."""
    logs.configure()  # in case this is not the sweep's process
    overrides = hydra_config.overrides.task
    words = (str(word).lstrip("+") for word in overrides)  # as the user gave them
    log.info("job %d: %s", hydra_config.job.num + 1, " ".join(words))
    job = SweptJob(
        number=int(hydra_config.job.num),
        overrides=tuple(map(str, overrides)),
        sweep=Path(os.environ.get(DIRECTORY) or hydra_config.sweep.dir).absolute(),
    )
    try:
        spec = compose.resolve(config)
    except Exception as error:
        refusal(job, error)
        raise
    from sparsepipe.sweep.job import run_swept

    done = run_swept(job, lambda: spec, fresh_processes=True)
    assert done.run is not None
    return scored(done.run, done.value)


def _report(error: SparsePipeError, state: _ExitState) -> None:
    """Prints an error and sets the exit code; of ranks with the same error, only one prints."""
    ranks = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    message = f"error: {ranks}{error}"
    state.exit_code = state.exit_code or error.exit_code
    if "LOCAL_RANK" in os.environ:
        from sparsepipe.launch.job import first_to_report
        from sparsepipe.runs.signals import ignore

        # The agent ends all ranks as soon as one has ended. Ranks that are not the first to report
        # end at once, so this one ignores the agent's signal before it checks whether it is first.
        ignore(signal.SIGTERM)
        if not (ranks or first_to_report(message)):
            return
    print(message, file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    main()
