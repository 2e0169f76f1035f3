"""Starts a probe for each batch size and keeps the results in the run's directory."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning.utilities.seed import isolate_rng

from sparsepipe.errors import ConfigError, HardwareError, SparsePipeError
from sparsepipe.planning.devices import memory_of
from sparsepipe.runs.lock import scratch
from sparsepipe.runs.out_of_memory import (
    empty_device,
    filled_share,
    kills_since,
    oom_kills,
    ran_out,
)
from sparsepipe.tasks.fitting.memory import OVER_BUDGET
from sparsepipe.tasks.fitting.probe import OUT_OF_MEMORY, TOO_FEW_SHAPES
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import read_json, write_json

log = logging.getLogger(__name__)

Outcome = Literal["fits", "over_budget", "out_of_memory", "killed_for_memory", "too_few_shapes"]
_OUTPUT_LINES = 20
_OUTCOMES: Mapping[int, Outcome] = {
    OVER_BUDGET: "over_budget",
    OUT_OF_MEMORY: "out_of_memory",
    TOO_FEW_SHAPES: "too_few_shapes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The outcome of a few training steps.

    Attributes:
        batch_size: samples of a minibatch.
        outcome: whether the steps fit, or why not.
        memory_bytes: the most memory that they took at a time; None: they do not fit.
        wall_s: seconds of the whole process, its start and the reading of data included.
    """

    batch_size: int
    outcome: Outcome
    memory_bytes: int | None
    wall_s: float

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"


class Prober:
    """Measures what training steps of a run need, and remembers the answers.

    Args:
        run: the run, of one process.
        budget_bytes: memory that steps may take: of a GPU, where it then really runs out, or
            resident memory of a process beyond what it had before the network was made. None: all
            that is free on a GPU, the memory of a processor by the inventory.
        steps: training steps of each probe. The first has no state of the optimizer beside its
            activations.
        timeout_s: limit of each probe.
        isolated: each probe is a process of its own; else it runs in this one, which only a GPU
            allows: its memory may run out without ending a process.
        whole: steps of smaller batches, of data with too few shapes, are no answer.

    Raises:
        ConfigError: a processor's memory is to be filled by this process.
        HardwareError: the amount of memory is unknown.
    """

    def __init__(
        self,
        run: ResolvedRun,
        *,
        budget_bytes: float | None,
        steps: int,
        timeout_s: float,
        isolated: bool = True,
        whole: bool = False,
    ) -> None:
        on_gpu = run.inventory.accelerator == "cuda"
        if not isolated and not on_gpu:
            raise ConfigError(
                "task.isolated=false on a processor: a step that needs too much would end the run",
                remedy="leave task.isolated=true, or train on a GPU",
            )
        if budget_bytes is None and not on_gpu:
            budget_bytes = memory_of(run.places[0], run.inventory)
            if budget_bytes is None:
                raise HardwareError(
                    "the inventory does not say how much memory the device has",
                    remedy="set task.budget_bytes",
                )
        self._budget_bytes = None if budget_bytes is None else int(budget_bytes)
        self._timeout_s, self._isolated = timeout_s, isolated
        self._request = {
            "spec": run.spec,
            "budget_bytes": self._budget_bytes,
            "steps": steps,
            "whole": whole,
        }
        self._file = run.directory.path / "probes.json"
        kept = read_json(self._file) if self._file.exists() else []
        self._known = {each["batch_size"]: Probe(**each) for each in kept}

    @property
    def values(self) -> dict[str, Any]:
        """Entries of ``result.json``: the budget and all probes by batch size."""
        probes = [self._known[size] for size in sorted(self._known)]
        return {
            "budget_bytes": self._budget_bytes,
            "probed_batches": [probe.batch_size for probe in probes],
            "probed_outcomes": [probe.outcome for probe in probes],
            "probed_memory_bytes": [probe.memory_bytes for probe in probes],
            "probing_s": sum(probe.wall_s for probe in probes),
        }

    def probe(self, batch_size: int) -> Probe:
        """The outcome of a batch size, measured once.

        Raises:
            SparsePipeError: steps fail, take too long, or are killed for another reason than
                memory.
            Stopped: a signal ended the run.
        """
        if batch_size in self._known:
            return self._known[batch_size]
        started_s = time.monotonic()
        with scratch() as place:
            request = {**self._request, "batch_size": batch_size}
            outcome, memory_bytes = (self._ask if self._isolated else self._try)(request, place)
        most_bytes = float("inf") if self._budget_bytes is None else self._budget_bytes
        if memory_bytes is not None and memory_bytes > most_bytes:  # the watch may have missed it
            outcome, memory_bytes = "over_budget", None
        found = self._known[batch_size] = Probe(
            batch_size=batch_size,
            outcome=outcome,
            memory_bytes=memory_bytes,
            wall_s=time.monotonic() - started_s,
        )
        write_json(self._file, [asdict(self._known[size]) for size in sorted(self._known)])
        memory = "" if memory_bytes is None else f", {memory_bytes / 1e6:,.0f} MB"
        log.info("batch size %d: %s%s (%.1f s)", batch_size, outcome, memory, found.wall_s)
        return found

    def _try(self, request: dict[str, Any], place: Path) -> tuple[Outcome, int | None]:
        """Takes the steps in this process and restores random state and threads."""
        from sparsepipe.tasks.fitting.steps import TooFewShapes, memory_of_steps

        threads = torch.get_num_threads()
        try:
            with isolate_rng():
                return "fits", memory_of_steps(**request, place=place)
        except TooFewShapes:
            return "too_few_shapes", None
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error, filled=filled_share(self._budget_bytes)):
                raise
        finally:
            torch.set_num_threads(threads)
            empty_device()
        empty_device()  # once more: the error has held what its frames refer to
        return "out_of_memory", None

    def _ask(self, request: dict[str, Any], place: Path) -> tuple[Outcome, int | None]:
        """Takes the steps in a process of their own."""
        (place / "parent").write_bytes(pickle.dumps(os.getpid()))
        (place / "request").write_bytes(pickle.dumps({**request, "place": place}))
        kills, size = oom_kills(), request["batch_size"]
        again = "the same command goes on with the search, with the answers that it has"
        try:
            with (place / "output").open("wb") as stream:
                done = subprocess.run(
                    [sys.executable, "-m", "sparsepipe.tasks.fitting.probe", str(place)],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C is for us, who end it
                    timeout=self._timeout_s,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise SparsePipeError(
                f"training steps of batch size {size} took longer than task.timeout_s="
                f"{self._timeout_s:g}: whether they fit is unknown",
                remedy=f"raise task.timeout_s; {again}",
            ) from None
        code = done.returncode
        if code == 0:
            answer: int | SparsePipeError = pickle.loads((place / "answer").read_bytes())
            if isinstance(answer, SparsePipeError):
                raise answer
            return "fits", answer
        if code in _OUTCOMES:
            return _OUTCOMES[code], None
        if code == -signal.SIGKILL and kills_since(kills):
            log.warning(
                "the kernel ended the training steps of batch size %d for want of memory, below "
                "their budget: other processes may hold the rest",
                size,
            )
            return "killed_for_memory", None
        output = (place / "output").read_text(errors="replace")
        lines = "\n".join(output.strip().splitlines()[-_OUTPUT_LINES:])
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise SparsePipeError(
            f"training steps of batch size {size} ended with {end}, and whether they fit "
            f"is unknown:\n{lines}",
            remedy=f"mend the cause; {again}",
        )
