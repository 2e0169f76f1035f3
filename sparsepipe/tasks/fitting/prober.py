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
from typing import Any, Literal, get_args

import torch
from pytorch_lightning.utilities.seed import isolate_rng

from sparsepipe.errors import ConfigError, DataError, HardwareError, SparsePipeError
from sparsepipe.planning.devices import memory_of
from sparsepipe.runs.lock import scratch
from sparsepipe.runs.out_of_memory import (
    empty_device,
    filled_share,
    kills_since,
    oom_kills,
    ran_out,
)
from sparsepipe.tasks.fitting.memory import OVER_BUDGET, Seen, most_bytes, took_much
from sparsepipe.tasks.fitting.probe import OUT_OF_MEMORY, TOO_FEW_SHAPES, Request
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.utils.files import read_json, write_json

log = logging.getLogger(__name__)

Outcome = Literal["fits", "over_budget", "out_of_memory", "killed_for_memory", "too_few_shapes"]
_OUTPUT_LINES = 20
_TRIES = 2
"""Attempts at a batch size whose process is killed."""
_END_S = 60.0
"""How long a killed process may take to end: it may have much memory to free."""
_OUTCOMES: Mapping[int, Outcome] = {
    OVER_BUDGET: "over_budget",
    OUT_OF_MEMORY: "out_of_memory",
    TOO_FEW_SHAPES: "too_few_shapes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The outcome of a few training steps.

    Attributes:
        batch_size: of the steps.
        outcome: whether they fit, or why not.
        memory_bytes: the most they took at a time; None where they do not fit.
        wall_s: the whole process, its start and the reading of data included.
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
        run: whose steps; of one process.
        budget_bytes: that they may take: of a GPU's memory, which then really runs out, or of a
            process's resident memory beyond what it had before the network was made. None: all
            that is free on a GPU, the memory of a processor by the inventory.
        steps: of training, in each probe. The first has no state of the optimizer beside its
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
        if not isolated and run.inventory.accelerator != "cuda":
            raise ConfigError(
                "task.isolated=false on a processor: a step that needs too much would end the run",
                remedy="leave task.isolated=true, or train on a GPU",
            )
        self._run = run
        self._budget_bytes = budget_of(
            budget_bytes,
            accelerator=run.inventory.accelerator,
            known_bytes=memory_of(run.places[0], run.inventory),
        )
        self._steps, self._timeout_s = steps, timeout_s
        self._isolated, self._whole = isolated, whole
        self._file = run.directory.path / "probes.json"
        self._known = _read(self._file)

    @property
    def values(self) -> dict[str, Any]:
        """Entries of ``result.json``: the budget and all probes by batch size."""
        probes = self._probes
        return {
            "budget_bytes": self._budget_bytes,
            "probed_batches": [probe.batch_size for probe in probes],
            "probed_outcomes": [probe.outcome for probe in probes],
            "probed_memory_bytes": [probe.memory_bytes for probe in probes],
            "probing_s": sum(probe.wall_s for probe in probes),
        }

    @property
    def _probes(self) -> list[Probe]:
        return [self._known[size] for size in sorted(self._known)]

    def probe(self, batch_size: int) -> Probe:
        """The outcome of a batch size, measured once. Raises a SparsePipeError where steps fail or
        take too long, and Stopped at a signal.
        """
        if batch_size not in self._known:
            found = self._ask(batch_size)
            self._known[batch_size] = found
            write_json(self._file, [asdict(each) for each in self._probes])
            log.info("%s", _probe_line(found))
        return self._known[batch_size]

    def _ask(self, batch_size: int) -> Probe:
        started_s = time.monotonic()
        outcome, memory_bytes = self._answer(batch_size)
        wall_s = time.monotonic() - started_s
        return Probe(
            batch_size=batch_size, outcome=outcome, memory_bytes=memory_bytes, wall_s=wall_s
        )

    def _answer(self, batch_size: int) -> tuple[Outcome, int | None]:
        if not self._isolated:
            return self._answer_here(batch_size)
        for_memory = False
        for _ in range(_TRIES):
            with scratch() as place:
                kills = oom_kills()
                code, request = self._run_in(place, batch_size)
                if code != -signal.SIGKILL:
                    return self._understood(code, request)
                for_memory = kills_since(kills) != 0  # or unknown
                if for_memory and self._took_much(Seen.read(request.seen)):
                    return "killed_for_memory", None
            log.warning("batch size %d: a process that tried it out was killed", batch_size)
        raise _killed(batch_size, times=_TRIES, for_memory=for_memory)

    def _answer_here(self, batch_size: int) -> tuple[Outcome, int | None]:
        """Takes the steps in this process and restores random state and threads."""
        from sparsepipe.tasks.fitting.steps import TooFewShapes

        threads = torch.get_num_threads()
        try:
            with scratch() as place, isolate_rng():
                return self._within(self._request(place, batch_size).take_steps())
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

    def _run_in(self, place: Path, batch_size: int) -> tuple[int, Request]:
        request = self._request(place, batch_size)
        (place / "request").write_bytes(pickle.dumps(request))
        code = _run(place / "request", output=place / "output", timeout_s=self._timeout_s)
        if code is None:
            raise _too_slow(batch_size, self._timeout_s)
        return code, request

    def _request(self, place: Path, batch_size: int) -> Request:
        return Request(
            spec=self._run.spec,
            batch_size=batch_size,
            budget_bytes=self._budget_bytes,
            steps=self._steps,
            isolated=self._isolated,
            whole=self._whole,
            answer=place / "answer",
            parent=os.getpid(),
        )

    def _understood(self, code: int, request: Request) -> tuple[Outcome, int | None]:
        """The outcome of a process that was not killed."""
        if code in _OUTCOMES:
            return _OUTCOMES[code], None
        if code != 0:
            output = request.answer.with_name("output").read_text(errors="replace")
            raise _broken(request.batch_size, code, output)
        answer: int | SparsePipeError = pickle.loads(request.answer.read_bytes())
        if isinstance(answer, SparsePipeError):
            raise answer
        return self._within(answer)

    def _within(self, memory_bytes: int) -> tuple[Outcome, int | None]:
        """The outcome of steps with this peak, which the watch may have missed."""
        over = self._budget_bytes is not None and memory_bytes > self._budget_bytes
        return ("over_budget", None) if over else ("fits", memory_bytes)

    def _took_much(self, seen: Seen) -> bool:
        on_host = self._run.inventory.accelerator == "cpu"  # else the budget is of a GPU
        budget_bytes = self._budget_bytes if on_host else None
        return took_much(seen, budget_bytes=budget_bytes, most_bytes=most_bytes())


def budget_of(
    requested_bytes: float | None, *, accelerator: str, known_bytes: int | None
) -> int | None:
    """The memory budget in bytes; None: a GPU is filled until its memory runs out.

    The budget is not the memory of that GPU, since other processes may hold varying parts of it.

    Args:
        requested_bytes: as the task has it; None: nothing.
        accelerator: of the device, ``cpu`` or ``cuda``.
        known_bytes: that the device has by the inventory; None: unknown.

    Raises:
        HardwareError: the amount of memory is unknown.
    """
    if requested_bytes is not None:
        return int(requested_bytes)
    if accelerator == "cuda":
        return None
    if known_bytes is None:
        raise HardwareError(
            "the inventory does not say what memory the device has",
            remedy="set task.budget_bytes",
        )
    return known_bytes


def _read(path: Path) -> dict[int, Probe]:
    if not path.exists():
        return {}
    try:
        probes = [Probe(**each) for each in read_json(path)]
        if strange := {probe.outcome for probe in probes} - {*get_args(Outcome)}:
            raise ValueError(strange)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path} does not hold probes", remedy="remove it, or give force=true"
        ) from error
    return {probe.batch_size: probe for probe in probes}


def _run(request: Path, *, output: Path, timeout_s: float) -> int | None:
    """The exit status of a probe; None where it took too long."""
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparsepipe.tasks.fitting.probe", str(request)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is for us, who end it
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if not _ended(process):
                raise _endless(process.pid, limit_s=_END_S) from None
            return None
        except BaseException:
            if not _ended(process):  # a warning, since another error is being raised
                log.warning("%s", _endless(process.pid, limit_s=_END_S))
            raise


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Kills a process and returns whether it ends soon."""
    process.kill()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _probe_line(found: Probe) -> str:
    took = f"{found.wall_s:.1f} s"
    if found.memory_bytes is None:
        return f"batch size {found.batch_size}: {found.outcome.replace('_', ' ')} ({took})"
    return f"batch size {found.batch_size}: {found.memory_bytes / 1e6:,.0f} MB ({took})"


def _endless(process: int, *, limit_s: float) -> SparsePipeError:
    """The error of a process that still runs long after it was killed."""
    return HardwareError(
        f"process {process}, which tried out a batch size, was killed and is there all the same "
        f"{limit_s:g} s later",
        remedy="the kernel holds it, most often for a GPU's driver or a network file system that "
        "hangs: see dmesg, and restart the machine where nothing else helps; the same command goes "
        "on with the search",
    )


def _too_slow(batch_size: int, timeout_s: float) -> SparsePipeError:
    """The error of steps that exceeded their time limit."""
    return SparsePipeError(
        f"training steps of batch size {batch_size} took longer than task.timeout_s={timeout_s:g}: "
        "whether they fit is not known",
        remedy="raise task.timeout_s: the same run goes on, with the answers that it has",
    )


def _killed(batch_size: int, *, times: int, for_memory: bool) -> SparsePipeError:
    """The error of steps that were killed each time."""
    why = "most often for memory that others had taken" if for_memory else "not for memory"
    return SparsePipeError(
        f"training steps of batch size {batch_size} were killed (signal 9) {times} times, {why}: "
        "whether they fit is not known",
        remedy="end what else takes memory, or find out who kills them; the same command goes on "
        "with the search, with the answers that it has",
    )


def _broken(batch_size: int, code: int, output: str) -> SparsePipeError:
    """The error of steps that failed otherwise; a negative exit code is a signal."""
    lines = "\n".join(output.strip().splitlines()[-_OUTPUT_LINES:])
    end = f"signal {-code}" if code < 0 else f"exit status {code}"
    return SparsePipeError(
        f"training steps of batch size {batch_size} ended with {end}, not for memory:\n{lines}",
        remedy="mend the cause; the same command goes on with the search",
    )
