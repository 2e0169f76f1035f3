"""GPUs that processes hold which cannot be ended: jobs wait for them for a while."""

from __future__ import annotations

import logging
import math
import time

from sparsepipe.errors import HardwareError
from sparsepipe.sweep.remaining import duration_text
from sparsepipe.sweep.running import RunningJob
from sparsepipe.sweep.verdict import left_text

log = logging.getLogger(__name__)
LIMIT_S = 1800.0
"""How long jobs wait for GPUs since the last ones were lost: a file system may be away for minutes,
and much memory takes a while to be given back. What takes longer most often has no end."""
_LOOK_AGAIN_S = 1.0


class Lost:
    """Jobs of which something is there though it was killed."""

    def __init__(self) -> None:
        self._jobs: list[RunningJob] = []
        self._since_s = self._looked_s = -math.inf

    def add(self, job: RunningJob) -> None:
        """Keeps an eye on a job that has been given up."""
        self._jobs.append(job)
        self._since_s = time.monotonic()
        gpus = ", ".join(job.grant.gpus)
        kept = f"; until that is gone no other job gets its GPUs ({gpus})" if gpus else ""
        log.warning("job %d: %s%s", job.ready.job.number + 1, left_text(job.process.left()), kept)

    def gone(self) -> list[RunningJob]:
        """Those that are gone at last, once each; looks once a second."""
        now_s = time.monotonic()
        if not self._jobs or now_s - self._looked_s < _LOOK_AGAIN_S:
            return []
        self._looked_s = now_s
        found = [job for job in self._jobs if job.process.is_gone()]
        for job in found:
            self._jobs.remove(job)
            log.info("job %d: what could not be ended is gone", job.ready.job.number + 1)
        return found

    def may_return(self) -> bool:
        """Whether what is lost is waited for yet."""
        return time.monotonic() - self._since_s <= LIMIT_S


def refused() -> HardwareError:
    """Of a job whose GPUs have not come back."""
    return HardwareError(
        "the GPUs that it takes are lost to processes of jobs before it, which cannot be ended, "
        f"for longer than {duration_text(LIMIT_S)}",
        remedy="end those or restart the machine, then give the command of the sweep again: "
        "finished runs are skipped",
    )
