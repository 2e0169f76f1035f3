"""A rank: ``python -m sparsepipe.experiment.worker <run directory>``, under the elastic agent."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from sparsepipe.runtime.launch import Stopped, follow_parent, report_failure


def main() -> None:
    """Runs the task of the run directory given on the command line."""
    follow_parent()
    try:
        _run(Path(sys.argv[1]))
    except Stopped as stop:
        _leave(stop, stop.exit_code)
    except BaseException as error:
        _leave(error, getattr(error, "exit_code", 1))


def _run(path: Path) -> None:
    from sparsepipe.experiment.build import build_inventory
    from sparsepipe.experiment.job import execute
    from sparsepipe.experiment.logs import configure
    from sparsepipe.experiment.rundir import RunDir
    from sparsepipe.experiment.signals import SignalWatch

    configure()
    with SignalWatch() as watch:
        directory = RunDir(path)
        config = directory.load_config()
        execute(directory, config, build_inventory(config), watch)


def _leave(error: BaseException, exit_code: int) -> None:
    """Ends without clean-up, which could wait for ranks that are gone."""
    report_failure(error, exit_code=exit_code, trace="".join(traceback.format_exception(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
