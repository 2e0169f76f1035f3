"""What a plan costs: the times of its stages and transfers, and the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.errors import PlanError
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


def check_room(
    plan: Sequence[Choice], spans: Spans, fleet: Fleet, memory: MemoryModel | None
) -> None:
    """Refuses a plan that does not fit the devices.

    Raises:
        PlanError: the message says which stage lacks how much.
    """
    if memory is None:
        return
    for number, (kept, room) in enumerate(plan_bytes(plan, spans, fleet, memory)):
        if room is not None and kept > room_bytes(room):
            raise PlanError(
                f"stage {number} keeps {kept / 2**20:,.0f} MiB on each device, and its smallest "
                f"holds {room / 2**20:,.0f} MiB",
                remedy="use a smaller data.batch_size, or a search that looks at the memory of "
                "each device: hete_mp or exact",
            )
