"""The end of a sweep: what failed, why, and the exit code of the command."""

from __future__ import annotations

import logging
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig

from sparsepipe.config.sweep_directory import announce, sweep_directory
from sparsepipe.errors import SparsePipeError
from sparsepipe.sweep.alone import give_back, take
from sparsepipe.sweep.progress import tail
from sparsepipe.sweep.record import JobRecord, records_of
from sparsepipe.sweep.swept import exhibit_of, near

log = logging.getLogger(__name__)
_TAIL_LINES = 12
_exit_codes: list[int] = []
_begun: list[DictConfig] = []
"""Sweeps of this process that have not ended."""


class SweepEnd(Callback):
    """Tells at a sweep's end which jobs failed, with the last lines of what they said."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Has the directory to itself, and lets jobs know where to leave their records."""
        try:
            take(sweep_directory(config), reports=exhibit_of(config) is not None)
        except SparsePipeError as error:
            log.error("error: %s", error)
            sys.exit(error.exit_code)  # from a callback Hydra passes nothing else on
        announce(config)
        _begun.append(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Tells of what failed, and what was stopped."""
        _begun.clear()
        records = records_of(sweep_directory(config))
        note_exit_code(records)  # of jobs that another launcher than ours has run
        if any(record.status != "finished" for record in records):
            log.warning("%s", "\n".join(failures(records)))
        give_back()


def end_early(error: Exception) -> bool:
    """Ends a sweep whose sweeper has given up for its jobs, as Hydra ends others.

    Sweepers that search raise where no job has a value, some also where the last one has none, and
    what is made of the others is not made.

    Args:
        error: what the sweeper has raised.

    Returns:
        Whether the sweeper is one that searches and jobs have failed, so that all is told; else the
        error is another's to tell: Hydra's own sweeper does not ask for values.
    """
    begun = list(_begun)
    for config in begun:
        for node in reversed(list(config.hydra.callbacks.values())):
            try:
                instantiate(node).on_multirun_end(config=config)
            except Exception as other:  # the next one has its own to tell
                log.warning("%s: %s", node._target_, other)
        if exit_code_of_sweep() and _searches(config):
            log.warning("%s", "".join(traceback.format_exception(error)).strip())
            log.error(
                "the sweep ends here: its sweeper does not end without their values (%s: %s)"
                "\n  remedy: mend the jobs and give the command again, which skips finished runs",
                type(error).__name__,
                error,
            )
    return any(map(_searches, begun)) and exit_code_of_sweep() != 0


def _searches(config: DictConfig) -> bool:
    return not str(config.hydra.sweeper._target_).endswith(".BasicSweeper")


def note_exit_code(records: Sequence[JobRecord]) -> None:
    """Lets the command end with the exit code of these jobs, where it has none yet."""
    _exit_codes.append(exit_code(records))


def exit_code_of_sweep() -> int:
    """Of the sweep that has ended in this process; 0 where none has."""
    return next((code for code in _exit_codes if code), 0)


def exit_code(records: Sequence[JobRecord]) -> int:
    """That of the first job that failed."""
    return next((record.exit_code or 1 for record in records if record.status != "finished"), 0)


def failures(records: Sequence[JobRecord]) -> Iterator[str]:
    """What to tell of jobs that failed or were stopped, line by line.

    Args:
        records: of all jobs that have ended, some of which did not finish.
    """
    counts = Counter(record.status for record in records)
    stopped = f", {counts['stopped']} stopped" if counts["stopped"] else ""
    yield f"{counts['failed']} of {len(records)} jobs failed{stopped}:"
    for record in records:
        if record.status != "finished":
            yield f"\njob {record.number + 1} ({record.text}): {record.error or record.status}"
        if record.status == "failed" and record.log is not None:
            yield f"  the end of {near(Path(record.log))}:"
            yield from (f"  | {line}" for line in tail(Path(record.log), lines=_TAIL_LINES))
