"""Traces: what the ranks of a pipeline, and Lightning around them, do on a few minibatches."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import Profiler
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.recording import Mark, Part, Recorder
from sparsepipe.schedule import Action, Span
from sparsepipe.strategies import PipelineStrategy, StagedStrategy

_ACTIONS = {"F": "forwards", "B": "backwards", "U": "updates"}

_SHOWN_MS = 0.05
"""Parts of a minibatch's time that are shorter are not shown."""

_SKIPPED = 2
"""Minibatches for each rank before those of a trace: the pipeline fills, and memory is warm."""

_TRACED = 3
"""Minibatches of a trace for each rank."""


def _part_of(name: str) -> Part | None:
    """Part of a rank's time that Lightning calls ``name`` where it profiles; None: it has others
    in it, or none.
    """
    last = name.rpartition(".")[2]
    named: dict[str, Part] = {
        "train_dataloader_next": "loads",
        "batch_to_device": "moves",
        "save_checkpoint": "saves",
    }
    return "hooks" if last.startswith("on_") else named.get(last)


class _Forwarding(Profiler):
    """Records what Lightning profiles, and hands it on to the run's own profiler."""

    def __init__(self, recorder: Recorder, own: Profiler) -> None:
        super().__init__()
        self.own = own
        self._recorder = recorder
        self._open: list[Mark] = []

    @override
    def start(self, action_name: str) -> None:
        self.own.start(action_name)
        self._open.append(self._recorder.mark())

    @override
    def stop(self, action_name: str) -> None:
        # The hook in which a trace begins was started before.
        mark = self._open.pop() if self._open else self._recorder.mark()
        if (part := _part_of(action_name)) is not None:
            self._recorder.since(mark, part)
        self.own.stop(action_name)


class Trace(pl.Callback):
    """Records what each rank of a pipeline does on a few minibatches.

    Ranks of one host share a clock. Those of other hosts are shifted by what their clocks show
    when all have met, which is exact to the time that such a meeting takes.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._validation: Mark | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, StagedStrategy) or strategy.pipeline is None:
            raise ConfigError(
                "trainer.trace=true records the stages of a pipeline on several ranks, and this "
                "training has none",
                remedy="choose parallel=hete_mp, pipeline or gpipe with two devices or more, or "
                "leave trainer.trace out; trainer.profiler=simple times the parts of any step",
            )
        is_cuda = strategy.root_device.type == "cuda"
        plan = strategy.plan.without_grids
        each = 1 if isinstance(strategy, PipelineStrategy) else plan.num_ranks
        rounds = math.lcm(*plan.replicas_of_stages) if each == 1 else 1
        self._recorder = recorder = Recorder(
            rank=trainer.global_rank,
            skipped=_whole(_SKIPPED * plan.num_ranks // each, rounds),
            count=_whole(_TRACED * plan.num_ranks // each, rounds),
            finish=torch.cuda.synchronize if is_cuda else None,
            core_clock=None if is_cuda else time.thread_time,
        )
        strategy.pipeline.worker.record(recorder)
        trainer.profiler = _Forwarding(recorder, trainer.profiler)  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            logger.log_metrics = _as_logs(recorder, logger.log_metrics)  # type: ignore[method-assign]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._validation = self._recorder.mark()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None and self._validation is not None:
            self._recorder.since(self._validation, "validates")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            vars(logger).pop("log_metrics", None)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, _Forwarding):  # whose report is still to come
            trainer.profiler = profiler.own  # type: ignore[attr-defined]

    def gathered(self) -> Measured | None:
        """What all ranks recorded; None where training ended before. Collective."""
        own = self._recorder
        if own is None:
            return None
        own.trim()
        process_group.gather_objects(own.rank, what="comparing clocks")
        now_s, host = own.clock(), os.uname().nodename
        recorded = {
            "spans": [
                (s.action.kind, s.action.number, s.action.microbatch, s.start, s.end)
                for s in own.spans
            ],
            "beside": [(moment.part, moment.start, moment.end) for moment in own.moments],
            "window": (own.begin_s, own.end_s),
            "without_core": own.without_core_s,
        }
        everyone = process_group.gather_objects((own.rank, host, now_s, recorded))
        return _on_one_clock([each for each in everyone if each[3]["spans"]])


def _whole(count: int, rounds: int) -> int:
    """The least number of whole rounds that has ``count``."""
    return -(-count // rounds) * rounds


def _as_logs(recorder: Recorder, log: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(log)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with recorder.moment("logs"):
            return log(*args, **kwargs)

    return recorded


def _on_one_clock(ranks: Sequence[tuple[int, str, float, Mapping[str, Any]]]) -> Measured | None:
    """What ranks recorded, by the first one's clock; each has its host and what its clock shows."""
    if not ranks:
        return None
    _, first_host, first_s, _ = ranks[0]
    shifts_s = {
        rank: 0.0 if host == first_host else first_s - now_s for rank, host, now_s, _ in ranks
    }
    begin_s = min(row[3] + shifts_s[rank] for rank, _, _, own in ranks for row in own["spans"])
    found = Measured()
    for rank, _, _, own in ranks:
        to_s = shifts_s[rank] - begin_s
        found.spans += [
            Span(rank, Action(kind, number, part), start + to_s, end + to_s)
            for kind, number, part, start, end in own["spans"]
        ]
        found.beside += [
            (rank, part, start + to_s, end + to_s) for part, start, end in own["beside"]
        ]
        begin, end = own["window"]
        found.windows[rank] = (begin + to_s, end + to_s)
        if own["without_core"] is not None:
            found.without_core_s[rank] = own["without_core"]
    return found


@dataclass(slots=True, kw_only=True)
class Measured:
    """What ranks did; seconds from the first action on.

    Attributes:
        spans: the actions of each rank, rank by rank and in order.
        beside: rank, what, begin and end of what else took its time.
        windows: by rank, begin and end of some whole steps of it.
        without_core_s: by rank, of the time in which it computed there, that in which its thread
            had no processor; ranks on GPUs are not in it.
    """

    spans: list[Span] = field(default_factory=list)
    beside: list[tuple[int, str, float, float]] = field(default_factory=list)
    windows: dict[int, tuple[float, float]] = field(default_factory=dict)
    without_core_s: dict[int, float] = field(default_factory=dict)

    def minibatches(self, rank: int) -> int:
        """Of a rank, in its window."""
        begin, end = self.windows[rank]
        return len(
            {
                span.action.number
                for span in self.spans
                if span.rank == rank and span.action.kind == "F" and begin <= span.start < end
            }
        )

    def times_s(self, rank: int) -> dict[str, float]:
        """Seconds of a rank for each of its minibatches, mean over its window: of its actions, of
        what is beside them, and as ``else`` what is left, which is Lightning's own loop.
        """
        begin, end = self.windows[rank]
        beside = [(part, start, stop) for of, part, start, stop in self.beside if of == rank]
        parts = dict.fromkeys(_ACTIONS.values(), 0.0)
        for span in (span for span in self.spans if span.rank == rank):
            own = max(begin, span.start), min(end, span.end)
            # Messages may leave amid an action.
            inside = sum(
                max(0.0, min(own[1], stop) - max(own[0], start)) for _, start, stop in beside
            )
            parts[_ACTIONS[span.action.kind]] += max(0.0, own[1] - own[0] - inside)
        for part, start, stop in beside:
            took = max(0.0, min(end, stop) - max(begin, start))
            parts[part] = parts.get(part, 0.0) + took
        parts["else"] = max(0.0, end - begin - sum(parts.values()))
        count = max(1, self.minibatches(rank))
        return {part: took / count for part, took in parts.items()}

    def in_words(self, rank: int, planned_s: Mapping[str, float]) -> str:
        """:meth:`times_s` as text, with those that a plan expected, by the same names."""
        times_s = self.times_s(rank)
        words = [
            f"{part} {1e3 * took:.1f}"
            + (f" ({1e3 * planned_s[part]:.1f} by the plan)" if part in planned_s else "")
            for part, took in times_s.items()
            if 1e3 * took >= _SHOWN_MS or part in planned_s
        ]
        line = f"{1e3 * sum(times_s.values()):.1f} ms for each of its minibatches: " + ", ".join(
            words
        )
        if rank not in self.without_core_s:
            return line
        computed_s = self.minibatches(rank) * sum(times_s[name] for name in _ACTIONS.values())
        # Of two clocks: where a rank always had its core, the difference may be below zero.
        share = max(0.0, self.without_core_s[rank] / computed_s) if computed_s else 0.0
        return f"{line}; in {share:.0%} of its computing it had no core to itself"
