"""What measurements between ranks share: how often, in whose turn, and what is said of failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sparsepipe.errors import TransportError
from sparsepipe.runtime.meeting import farewell, meeting, new_group
from sparsepipe.runtime.waits import AGAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often something is timed, and how long that may take.

    Attributes:
        repeats: times that count; at least 1.
        warmups: times before those; fewer where they would take longer than ``most_s``.
        most_s: after which nothing is repeated once more; it is timed once at least.
        timeout_s: limit of every wait for another rank.
    """

    repeats: int
    warmups: int
    most_s: float
    timeout_s: float

    def times_s(self, exchange: Callable[[bool], None]) -> list[float]:
        """Times of an exchange.

        Args:
            exchange: does it once; is told whether that is the last time.
        """
        begun_s, warm, counted = time.perf_counter(), 0, list[float]()
        while True:
            start_s = time.perf_counter()
            over = start_s - begun_s > self.most_s
            counts = over or warm >= self.warmups
            last = counts and (over or len(counted) + 1 >= self.repeats)
            exchange(last)
            if counts:
                counted.append(time.perf_counter() - start_s)
            else:
                warm += 1
            if last:
                return counted

    def within(self, once_s: float) -> tuple[int, int]:
        """Warm-ups and repeats of what takes ``once_s``, all in ``most_s`` unless it is but one."""
        room = max(1, int(self.most_s / max(once_s, 1e-9)))
        warmups = min(self.warmups, room - 1)
        return warmups, min(self.repeats, room - warmups)


class Bench:
    """All ranks at one measurement after the other; every rank makes one at the same time.

    Args:
        effort: how often.
        device: where what is sent lies.
        direct: messages between CUDA devices go over NCCL.
    """

    def __init__(
        self, effort: Effort, *, device: torch.device | None = None, direct: bool = False
    ) -> None:
        self.effort = effort
        self.device = device or torch.device("cpu")
        self.direct = direct
        everyone = list(range(dist.get_world_size()))
        self._everyone = new_group(everyone, backend="gloo", timeout_s=effort.timeout_s)

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """A measurement by some of the ranks, for whose end all others wait.

        Args:
            what: it is, as "timing ranks 0 and 1".
        """
        try:
            try:
                yield
            except Exception as error:
                farewell(error)  # to those that wait for the end, whom nobody else would tell
                raise
            with meeting(f"the meeting after {what}", self._everyone):
                dist.barrier(self._everyone)
        except TransportError as error:
            error.message += f" (while {what})"
            error.remedy = error.remedy.replace(AGAIN, "run the command again")
            raise

    def settle(self) -> None:
        """Waits for what this rank's device has been asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Ends what only measurements need; a collective."""
        dist.destroy_process_group(self._everyone)
