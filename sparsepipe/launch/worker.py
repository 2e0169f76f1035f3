"""The program of a rank, started as ``python -m sparsepipe.launch.worker RUN_DIRECTORY``."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.util import register_after_fork
from pathlib import Path

from sparsepipe.utils.process import end_with_parent, exit_with_parent, no_garbage_collection

if "SPARSEPIPE_LAUNCHER" in os.environ and __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the run handles it, Ctrl-C ends this process without a traceback of an import.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(int(os.environ["SPARSEPIPE_LAUNCHER"]))  # first: torch's import takes seconds

with no_garbage_collection():
    from sparsepipe.emulate import enter_host
    from sparsepipe.runtime.failures.rank_reports import exit_immediately


def main() -> None:
    """Runs the task of the run whose directory is given on the command line."""
    try:
        enter_host()
        with no_garbage_collection():
            from sparsepipe.config.build import build_inventory
            from sparsepipe.config.run_spec import RunSpec
            from sparsepipe.data.files import FOUND
            from sparsepipe.launch.execute import execute
            from sparsepipe.runs.lock import keep_temporary_files_apart
            from sparsepipe.runs.logs import configure
            from sparsepipe.runs.rundir import RunDir
            from sparsepipe.runs.signals import SIGNALS, SignalWatch, ignore
            from sparsepipe.tasks.task import ResolvedRun
            from sparsepipe.utils.host import git_commit

        configure()
        FOUND.disabled = True  # the process that started the ranks has logged the data found
        keep_temporary_files_apart()
        # Workers that a user's own loader forks end with this rank at once: by themselves, they
        # look for their parent every five seconds.
        register_after_fork(main, lambda _: exit_with_parent())
        with SignalWatch() as watch:
            try:
                git_commit()  # now: the checkout may change while the run goes on
                directory = RunDir(Path(sys.argv[1]))
                spec = RunSpec.load(directory.config)
                run = ResolvedRun.of(spec, build_inventory(spec), directory=directory, watch=watch)
                execute(run)
            except BaseException as error:
                # When a rank ends, the launcher ends all others, and Ctrl-C reaches every process:
                # neither may interrupt this rank's report or replace it.
                ignore(*SIGNALS)
                exit_immediately(error)
    except BaseException as error:
        exit_immediately(error)


if __name__ == "__main__":
    main()
