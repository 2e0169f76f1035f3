"""The end of a sweep: what failed, why, and the exit code of the command."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.experiment.sweep.directory import announce, sweep_directory
from sparsepipe.experiment.sweep.progress import tail
from sparsepipe.experiment.sweep.record import JobRecord, records_of
from sparsepipe.experiment.swept import near

log = logging.getLogger(__name__)
_TAIL_LINES = 12
_exit_codes: list[int] = []


class SweepEnd(Callback):
    """Tells at a sweep's end which jobs failed, with the last lines of what they said."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Lets jobs know where to leave their records."""
        announce(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Tells of what failed."""
        records = records_of(sweep_directory(config))
        failed = [record for record in records if record.status != "finished"]
        if failed:
            log.warning("%s", "\n".join(failures(failed, total=len(records))))
        _exit_codes[:] = [exit_code(records)]


def exit_code_of_sweep() -> int:
    """Of the sweep that has ended in this process; 0 where none has."""
    return _exit_codes[0] if _exit_codes else 0


def exit_code(records: Sequence[JobRecord]) -> int:
    """That of the first job that failed."""
    return next((record.exit_code or 1 for record in records if record.status != "finished"), 0)


def failures(failed: Sequence[JobRecord], *, total: int) -> Iterator[str]:
    """What to tell of jobs that failed, line by line."""
    yield f"{len(failed)} of {total} jobs failed:"
    for record in failed:
        yield f"\njob {record.number + 1} ({record.text}): {record.error or record.status}"
        if record.log is not None:
            yield f"  the end of {near(Path(record.log))}:"
            yield from (f"  | {line}" for line in tail(Path(record.log), lines=_TAIL_LINES))
