"""Records what the ranks of a pipeline, and Lightning in these ranks, do on a few minibatches."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import Profiler
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.recording import Mark, Part, Recorder
from sparsepipe.schedule import Span
from sparsepipe.schedule.spans import ACTIONS
from sparsepipe.strategies import PipelineStrategy, StagedStrategy

_ACTIONS = {kind: f"{name}s" for kind, name in ACTIONS.items()}

_SHOWN_MS = 0.05
"""Parts of a minibatch's time that are shorter than this are not shown."""

_SKIPPED = 2
"""Minibatches per rank before a trace, during which the pipeline fills and allocates memory."""

_TRACED = 3
"""Minibatches per rank in a trace."""


_PROFILED: dict[str, Part] = {
    "train_dataloader_next": "loads",
    "batch_to_device": "moves",
    "save_checkpoint": "saves",
}
"""Parts of a rank's time, by the names of actions that Lightning profiles. Hooks are one more part;
any other action contains several parts, or none."""


class _Forwarding(Profiler):
    """Records the actions that Lightning profiles, and forwards them to the run's own profiler."""

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
        # The hook in which a trace begins started before this profiler was set.
        mark = self._open.pop() if self._open else self._recorder.mark()
        name = action_name.rpartition(".")[2]
        part: Part | None = "hooks" if name.startswith("on_") else _PROFILED.get(name)
        if part is not None:
            self._recorder.since(mark, part)
        self.own.stop(action_name)


class Trace(pl.Callback):
    """Records what each rank of a pipeline does on a few minibatches.

    Ranks of one host share a clock. Times of other hosts are shifted by the clocks' difference
    right after a collective, which is accurate to the duration of that collective.
    """

    _recorder: Recorder | None = None
    _validation: Mark | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, StagedStrategy) or strategy.pipeline is None:
            raise ConfigError(
                "trainer.trace=true records the stages of a pipeline on several ranks, but this "
                "training is not one",
                remedy="choose parallel=hete_mp, pipeline or gpipe with two devices or more, or "
                "leave trainer.trace out; trainer.profiler=simple times the parts of any step",
            )
        is_cuda = strategy.root_device.type == "cuda"
        plan = strategy.plan.without_grids
        each = 1 if isinstance(strategy, PipelineStrategy) else plan.num_ranks
        rounds = math.lcm(*plan.replicas_of_stages) if each == 1 else 1
        self._recorder = recorder = Recorder(
            rank=trainer.global_rank,
            skipped=math.ceil(_SKIPPED * plan.num_ranks // each / rounds) * rounds,
            count=math.ceil(_TRACED * plan.num_ranks // each / rounds) * rounds,
            finish=torch.cuda.synchronize if is_cuda else None,
            core_clock=None if is_cuda else time.thread_time,
        )
        strategy.pipeline.worker.record(recorder)
        trainer.profiler = _Forwarding(recorder, trainer.profiler)  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            recorded = recorder.moment("logs")(logger.log_metrics)
            logger.log_metrics = recorded  # type: ignore[method-assign]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._validation = self._recorder.mark()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None and self._validation is not None:
            self._recorder.since(self._validation, "validates")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for logger in trainer.loggers:
            vars(logger).pop("log_metrics", None)
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, _Forwarding):  # which has yet to report
            trainer.profiler = profiler.own  # type: ignore[attr-defined]

    def gathered(self) -> Measured | None:
        """Returns the records of all ranks; None: training ended before a trace. Collective."""
        own = self._recorder
        if own is None:
            return None
        own.trim()
        process_group.gather_objects(own.rank, what="comparing clocks")
        now_s, host = own.clock(), os.uname().nodename
        spans = [(s.kind, s.number, s.microbatch, s.start, s.end) for s in own.spans]
        window = own.begin_s, own.end_s, own.without_core_s
        everyone = process_group.gather_objects((own.rank, host, now_s, spans, window))
        everyone = [each for each in everyone if any(kind in ACTIONS for kind, *_ in each[3])]
        if not everyone:
            return None
        # By the first rank's clock, from the first action on.
        first_host, first_s = everyone[0][1:3]
        shifts_s = [0.0 if host == first_host else first_s - now_s
                    for _, host, now_s, _, _ in everyone]  # fmt: skip
        begin_s = min(
            start + to_s
            for (_, _, _, spans, _), to_s in zip(everyone, shifts_s, strict=True)
            for kind, _, _, start, _ in spans
            if kind in ACTIONS
        )
        found = Measured()
        for (rank, _, _, spans, window), shift_s in zip(everyone, shifts_s, strict=True):
            to_s = shift_s - begin_s
            found.spans += [
                Span(rank, kind, number, part, start=start + to_s, end=end + to_s)
                for kind, number, part, start, end in spans
            ]
            begin, end, without_core_s = window
            assert begin is not None
            assert end is not None, "a trimmed recorder has both"
            found.windows[rank] = (begin + to_s, end + to_s)
            if without_core_s is not None:
                found.without_core_s[rank] = without_core_s
        return found


@dataclass(slots=True, kw_only=True)
class Measured:
    """What ranks did in a trace, in seconds since its first action.

    Attributes:
        spans: actions and other parts of ranks' time, rank by rank and in order.
        windows: by rank, begin and end of its traced steps.
        without_core_s: by rank on a CPU, how long its thread waited for a core while it computed
            in its window.
    """

    spans: list[Span] = field(default_factory=list)
    windows: dict[int, tuple[float, float]] = field(default_factory=dict)
    without_core_s: dict[int, float] = field(default_factory=dict)

    def minibatches(self, rank: int) -> int:
        """Returns the number of minibatches that a rank begins in its window."""
        begin, end = self.windows[rank]
        own = (span for span in self.spans if span.rank == rank and span.kind == "F")
        return len({span.number for span in own if begin <= span.start < end})

    def times_s(self, rank: int) -> dict[str, float]:
        """Returns a rank's mean seconds per minibatch, by part: actions, other recorded parts, and
        as ``else`` the rest of its window, which is Lightning's own loop.
        """
        begin, end = self.windows[rank]
        own = [span for span in self.spans if span.rank == rank]
        beside = [span for span in own if not span.is_action]
        parts = dict.fromkeys(_ACTIONS.values(), 0.0)
        for span in own:
            start, stop = max(begin, span.start), min(end, span.end)
            took = max(0.0, stop - start)
            if span.is_action:  # without parts within it, such as messages it sends
                overlaps = (min(stop, each.end) - max(start, each.start) for each in beside)
                took = max(0.0, stop - start - sum(max(0.0, overlap) for overlap in overlaps))
            name = _ACTIONS.get(span.kind, span.kind)
            parts[name] = parts.get(name, 0.0) + took
        parts["else"] = max(0.0, end - begin - sum(parts.values()))
        count = max(1, self.minibatches(rank))
        return {part: took / count for part, took in parts.items()}

    def in_words(self, rank: int, planned_s: Mapping[str, float]) -> str:
        """Formats :meth:`times_s` in ms; ``planned_s``: seconds per part that the plan expected."""
        times_s = self.times_s(rank)
        words = [
            f"{part} {1e3 * took:.1f}"
            + (f" ({1e3 * planned_s[part]:.1f} by the plan)" if part in planned_s else "")
            for part, took in times_s.items()
            if 1e3 * took >= _SHOWN_MS or part in planned_s
        ]
        total_ms = 1e3 * sum(times_s.values())
        line = f"{total_ms:.1f} ms per minibatch: {', '.join(words)}"
        if rank not in self.without_core_s:
            return line
        computed_s = self.minibatches(rank) * sum(times_s[name] for name in _ACTIONS.values())
        # Two clocks differ: if a rank always had its core, this may be below zero.
        share = max(0.0, self.without_core_s[rank] / computed_s) if computed_s else 0.0
        return f"{line}; in {share:.0%} of its computing it had no core to itself"
