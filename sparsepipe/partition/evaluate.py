"""What a plan costs: the times of its stages and transfers, and the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.partition.cost import CostModel
from sparsepipe.partition.fleet import Fleet
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.partition.spans import Spans
from sparsepipe.partition.ties import Choice


def plan_times(
    plan: Sequence[Choice], spans: Spans, fleet: Fleet, model: CostModel
) -> tuple[list[float], list[float]]:
    """Seconds of each stage, and of the transfer behind each stage but the last."""
    stages, cuts = [], []
    for number, stage in enumerate(plan):
        stages.append(
            model.stage_s(
                spans.compute_s(
                    stage.first, stage.end, [k for k, n in enumerate(stage.counts) if n]
                ),
                spans.parameter_bytes(stage.first, stage.end),
                replicas=sum(stage.counts),
                bytes_per_s=fleet.sync_bytes_per_s(stage.counts),
            )
        )
        if number:
            before = fleet.host_of(plan[number - 1].counts)
            speed = fleet.cut_bytes_per_s(before, fleet.host_of(stage.counts))
            each = model.cut_s_per_byte(sum(stage.counts), bytes_per_s=speed)
            cuts.append(each * float(spans.cut_bytes_I[stage.first]))
    return stages, cuts


def bottleneck_s(plan: Sequence[Choice], spans: Spans, fleet: Fleet, model: CostModel) -> float:
    """Seconds between two minibatches: of the slowest stage or transfer."""
    stages, cuts = plan_times(plan, spans, fleet, model)
    return max(stages + cuts)


def plan_bytes(
    plan: Sequence[Choice], spans: Spans, fleet: Fleet, memory: MemoryModel
) -> list[tuple[float, float | None]]:
    """What each device of each stage keeps, and what the smallest of them holds, if known."""
    found = []
    for number, stage in enumerate(plan):
        kept = memory.stage_bytes(
            spans.parameter_bytes(stage.first, stage.end),
            spans.stored_bytes(stage.first, stage.end),
            replicas=sum(stage.counts),
            left=sum(sum(later.counts) for later in plan[number:]),
        )
        rooms = [
            kind.memory_bytes
            for kind, count in zip(fleet.kinds, stage.counts, strict=True)
            if count and kind.memory_bytes is not None
        ]
        found.append((kept, min(rooms, default=None)))
    return found


def fits(plan: Sequence[Choice], spans: Spans, fleet: Fleet, memory: MemoryModel | None) -> bool:
    """Whether each device holds what its stage keeps."""
    return memory is None or all(
        room is None or kept <= room_bytes(room)
        for kept, room in plan_bytes(plan, spans, fleet, memory)
    )
