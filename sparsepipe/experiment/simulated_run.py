"""What a simulation came to, in figures and files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from sparsepipe.experiment.rundir import RunDir
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.results.files import write_text_atomic
from sparsepipe.results.tables import markdown_table, write_csv
from sparsepipe.results.timeline_picture import timeline_picture
from sparsepipe.schedule import Plan
from sparsepipe.simulate.lanes import lanes
from sparsepipe.simulate.memory import Level, memory_over_time, peak_bytes
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.schedules import Simulation
from sparsepipe.simulate.steady import Pace
from sparsepipe.simulate.trace import trace_text

log = logging.getLogger(__name__)

_PICTURE_IN = 24.0  # of the bars
_SEEN = 1000  # what takes a smaller part of the time is no more than a line in the picture
_SECONDS_FROM_S = 2.0  # a picture of so long tells seconds, a shorter one milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan's simulation beside that of data parallelism on the same devices.

    Attributes:
        plan: the stages and their devices.
        pace: of an epoch.
        dp: of an epoch by data parallelism.
        batch_size: shapes of a minibatch.
        record: the first minibatches, drained after them.
        memory: of each rank in these.
        peaks_bytes: of each rank in the long run.
        rooms: memory of each rank's device; None where nobody knows.
    """

    plan: Plan
    pace: Pace
    dp: Pace
    batch_size: int
    record: Record
    memory: Sequence[Sequence[Level]]
    peaks_bytes: Sequence[float]
    rooms: Sequence[float | None]

    @classmethod
    def of(
        cls,
        simulation: Simulation,
        dp: Simulation,
        *,
        minibatches: int,
        shown: int,
        memory: MemoryModel,
        batch_size: int,
        rooms: Sequence[float | None],
    ) -> Self:
        """Runs both.

        Args:
            simulation: of the plan.
            dp: of data parallelism on the same devices.
            minibatches: of an epoch.
            shown: minibatches of the picture.
            memory: what counts.
            batch_size: shapes of a minibatch.
            rooms: memory of each rank's device; None where nobody knows.

        Raises:
            ScheduleError: ranks would wait for one another for ever.
        """
        workload = simulation.workload
        record = simulation.record(shown)
        # As long as any stage needs to have all its minibatches in flight and their versions.
        filled = simulation.record(4 * workload.plan.num_ranks)
        return cls(
            plan=workload.plan,
            pace=simulation.pace(minibatches),
            dp=dp.pace(minibatches),
            batch_size=batch_size,
            record=record,
            memory=memory_over_time(record, workload, memory),
            peaks_bytes=[peak_bytes(r) for r in memory_over_time(filled, workload, memory)],
            rooms=rooms,
        )

    def values(self) -> dict[str, Any]:
        """For ``result.json``."""
        busy = self.pace.busy
        return {
            "kind": "simulated",
            "simulated_shapes_per_s": self.batch_size / self.pace.minibatch_s,
            "minibatches_per_s": 1 / self.pace.minibatch_s,
            "minibatch_s": self.pace.minibatch_s,
            "epoch_s": self.pace.total_s,
            "epoch_minibatches": self.pace.minibatches,
            "shapes_per_minibatch": self.batch_size,
            "dp_minibatch_s": self.dp.minibatch_s,
            "dp_epoch_s": self.dp.total_s,
            "speedup_over_dp": self.dp.minibatch_s / self.pace.minibatch_s,
            "epoch_speedup_over_dp": self.dp.total_s / self.pace.total_s,
            "busy_share": sum(busy) / len(busy),
            "bubble_share": 1 - sum(busy) / len(busy),
            "device_peak_bytes": max(self.peaks_bytes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each device."""
        found = []
        for stage_number, stage in enumerate(self.plan.stages):
            for rank, device in zip(self.plan.ranks_of(stage_number), stage.devices, strict=True):
                found.append(
                    {
                        "rank": rank,
                        "device": device,
                        "stage": stage_number,
                        "first_layer": stage.layers[0],
                        "last_layer": stage.layers[1],
                        "busy_share": self.pace.busy[rank],
                        "bubble_share": 1 - self.pace.busy[rank],
                        "peak_bytes": self.peaks_bytes[rank],
                        "memory_bytes": self.rooms[rank],
                        "kind": "simulated",
                    }
                )
        return found

    def table(self) -> str:
        """The devices and the pace in words and figures."""
        head = ("device", "stage", "layers", "busy", "idle", "peak memory MiB")
        cells = [
            (
                row["device"],
                str(row["stage"]),
                f"{row['first_layer']}-{row['last_layer']}",
                f"{row['busy_share']:.1%}",
                f"{row['bubble_share']:.1%}",
                f"{row['peak_bytes'] / 2**20:,.0f}",
            )
            for row in self.rows()
        ]
        values = self.values()
        return "\n".join(
            [
                f"{self.plan.config}, simulated",
                markdown_table(head, cells),
                f"{values['minibatches_per_s']:.4g} minibatches/s, "
                f"{values['simulated_shapes_per_s']:.4g} samples/s; an epoch of "
                f"{self.pace.minibatches} minibatches takes {self.pace.total_s:.4g} s",
                f"{values['speedup_over_dp']:.2f}x as fast as data parallelism on the same devices "
                f"({values['epoch_speedup_over_dp']:.2f}x over the epoch)",
            ]
        )


def write_outcome(outcome: Outcome, directory: RunDir, *, title: str) -> None:
    """Prints the table, and writes it with the plan, the devices, the picture and the trace.

    Args:
        outcome: of a simulation.
        directory: of the run.
        title: of the picture.

    Raises:
        DataError: a file cannot be written.
    """
    path = directory.path
    table = outcome.table()
    log.info("%s", table)
    for row in outcome.rows():
        room = row["memory_bytes"]
        if room is not None and row["peak_bytes"] > room_bytes(room):
            log.warning(
                "%s would need %.0f MiB of memory and has %.0f",
                row["device"],
                row["peak_bytes"] / 2**20,
                room / 2**20,
            )
    write_text_atomic(path / "simulation.txt", table + "\n")
    write_csv(path / "devices.csv", outcome.rows())
    write_text_atomic(path / "trace.json", trace_text(outcome.record, memory=outcome.memory))
    _draw(outcome, directory, title)
    write_text_atomic(directory.plan, outcome.plan.to_json())


def _draw(outcome: Outcome, directory: RunDir, title: str) -> None:
    in_seconds = outcome.record.end_s >= _SECONDS_FROM_S
    timeline_picture(
        lanes(
            outcome.record,
            names=[f"stage {row['stage']}: {row['device']}" for row in outcome.rows()],
            unit_s=1.0 if in_seconds else 1e-3,
            least_s=outcome.record.end_s / _SEEN,
        ),
        directory.path / "timeline.png",
        title=title,
        unit_name="seconds" if in_seconds else "milliseconds",
        max_width_in=_PICTURE_IN,
    )
