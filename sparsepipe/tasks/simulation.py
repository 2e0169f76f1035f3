"""A simulation of a plan beside data parallelism, and what comes of it in figures and files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Self

from sparsepipe.cluster import Inventory
from sparsepipe.config.schema import MICROBATCHES_KEY, Parallel
from sparsepipe.errors import HardwareError, ProfileError
from sparsepipe.partition.activation_checkpointing.setting import spans_in_plan
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.planning.given_plan import data_parallel
from sparsepipe.plots import style
from sparsepipe.plots.timeline import lanes, some_ranks, timelines_figure
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.simulate.engine import Record, Setting
from sparsepipe.simulate.memory import Level, long_run_peaks_bytes, memory_over_time
from sparsepipe.simulate.network import Algorithm, ClusterNetwork, Sends
from sparsepipe.simulate.simulation import SCHEDULES, Pace, Simulation
from sparsepipe.simulate.trace import trace_text
from sparsepipe.simulate.workload import Workload
from sparsepipe.utils.files import write_text_atomic
from sparsepipe.utils.tables import markdown_table, write_csv

log = logging.getLogger(__name__)

_PICTURE_IN = 24.0  # of the bars
_DRAWN = 32  # devices that have lanes in the picture
_LISTED = 32  # devices that are listed and warned of; devices.csv has all
_SEEN = 1000  # what takes a smaller part of the time is no more than a line in the picture
_SECONDS_FROM_S = 2.0  # a picture of so long is in seconds, a shorter one in milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSettings:
    """How messages and sums go; None: as the runtime has them.

    Args:
        overlap: sums over replicas overlap with the backward; None: in data parallelism only.
        all_reduce: how replicas sum; None: a ring in data parallelism, else in the
            order of the ranks.
        sends: how messages are handed over.
        bucket_mib: parts of sums that overlap.
        mode: which weights a minibatch sees (:class:`~sparsepipe.simulate.workload.Workload`).
    """

    overlap: bool | None
    all_reduce: Algorithm | None
    sends: Sends
    bucket_mib: float
    mode: str

    def setting(self, plan: Plan, inventory: Inventory, *, is_dp: bool) -> Setting:
        """The setting for a plan.

        Raises:
            HardwareError: a link that the plan needs has no bandwidth.
        """
        overlaps = is_dp if self.overlap is None else self.overlap
        return Setting(
            network=ClusterNetwork.of(inventory, plan),
            sends=self.sends,
            algorithm=self.all_reduce or ("ring" if is_dp else "ordered"),
            bucket_bytes=self.bucket_mib * 2.0**20 if overlaps else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Which schedule is simulated.

    Args:
        name: see :data:`sparsepipe.simulate.simulation.SCHEDULES`.
        microbatches: T; None: see :meth:`Simulation.of`.
        option: key of the configuration that has T.
    """

    name: str
    microbatches: int | None
    option: str = "task.microbatches"

    @classmethod
    def of(cls, parallel: Parallel, name: str | None, microbatches: int | None) -> Scheduled:
        """The task's schedule and microbatches, else the strategy's."""
        synchronous = parallel.synchronous
        if name is None:
            name = "asynchronous" if synchronous is None else synchronous.schedule
        made = cls(name=name, microbatches=microbatches)
        if microbatches is not None or synchronous is None or not made.splits:
            return made
        return cls(name=name, microbatches=synchronous.microbatches, option=MICROBATCHES_KEY)

    @property
    def splits(self) -> bool:
        """Whether minibatches are split; False for unknown schedules."""
        return self.name in SCHEDULES and SCHEDULES[self.name].splits


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan, and what it is compared with: data parallelism on all devices of the inventory.

    These are what a user has in place of the plan, which may leave some of them out.

    Attributes:
        plan: under its schedule.
        dp: data parallelism by :class:`CommunicationSettings`, which may let its sums overlap with
            the backward; these go in a ring, but for a plan that is data parallelism itself. None:
            it cannot be simulated.
        dp_apart: the same with sums after the backward.
        without_dp: why it cannot.
    """

    plan: Simulation
    dp: Simulation | None
    dp_apart: Simulation | None
    without_dp: str = ""

    @classmethod
    def of(
        cls,
        plan: Plan,
        profiles: Mapping[str, Profile],
        inventory: Inventory,
        settings: CommunicationSettings,
        *,
        is_dp: bool,
        scheduled: Scheduled,
    ) -> Comparison:
        """The simulations for a plan on all or some devices of an inventory.

        Raises:
            ConfigError: unknown schedule, or a setting that does not suit it or the plan.
            ProfileError: a device of the plan has no profile.
            PlanError: the plan does not fit the profiles.
            HardwareError: a link that the plan needs has no bandwidth.
        """
        workload = Workload.of(plan, profiles, mode=settings.mode)
        if scheduled.splits:
            workload = workload.recomputing(spans_in_plan(plan), profiles)
        simulated = Simulation.of(
            workload,
            settings.setting(plan, inventory, is_dp=is_dp),
            schedule=scheduled.name,
            microbatches=scheduled.microbatches,
            option=scheduled.option,
        )
        everywhere = data_parallel(inventory, plan.num_layers)
        beside = settings if is_dp else replace(settings, all_reduce=None)  # which is of the plan
        try:
            dp = Simulation.of(
                Workload.of(everywhere, profiles), beside.setting(everywhere, inventory, is_dp=True)
            )
        except (HardwareError, ProfileError) as error:  # of what the plan does without
            return cls(plan=simulated, dp=None, dp_apart=None, without_dp=error.message)
        apart = replace(dp, setting=replace(dp.setting, bucket_bytes=None))
        return cls(plan=simulated, dp=dp, dp_apart=apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationFigures:
    """A plan's simulation beside that of data parallelism on all devices of the hardware.

    Attributes:
        plan: the stages and their devices.
        pace: pace of an epoch.
        dp: pace of an epoch by data parallelism; None: it cannot be simulated.
        dp_overlaps: whether its sums overlap with the backward.
        dp_apart: pace of an epoch by data parallelism whose sums do not; None as well.
        without_dp: why it cannot.
        batch_size: shapes of a minibatch.
        record: the first minibatches, drained after them.
        memory: memory of each rank in these over time.
        peaks_bytes: peak memory of each rank in the long run.
        rooms: memory of each rank's device; None if unknown.
    """

    plan: Plan
    pace: Pace
    dp: Pace | None
    dp_overlaps: bool
    dp_apart: Pace | None
    without_dp: str
    batch_size: int
    record: Record
    memory: Sequence[Sequence[Level]]
    peaks_bytes: Sequence[float]
    rooms: Sequence[float | None]

    @classmethod
    def of(
        cls,
        comparison: Comparison,
        *,
        minibatches: int,
        shown: int,
        memory: MemoryModel,
        batch_size: int,
        rooms: Sequence[float | None],
    ) -> Self:
        """Simulates the plan and data parallelism.

        Raises:
            ScheduleError: ranks would wait for one another for ever.
        """
        simulation = comparison.plan
        record = simulation.record(ceil(shown / simulation.batches))
        # In batches of the first stage's devices, which profiles are of; several may be one
        # minibatch.
        found = simulation.pace(ceil(minibatches / simulation.batches))
        minibatch_s = found.minibatch_s / simulation.batches
        pace = replace(found, minibatches=minibatches, minibatch_s=minibatch_s)
        dp = apart = None
        if comparison.dp is not None and comparison.dp_apart is not None:
            dp = pace if comparison.dp == simulation else comparison.dp.pace(minibatches)
            apart = (
                dp
                if comparison.dp == comparison.dp_apart
                else comparison.dp_apart.pace(minibatches)
            )
        return cls(
            plan=simulation.workload.plan,
            pace=pace,
            dp=dp,
            dp_overlaps=comparison.dp != comparison.dp_apart,
            dp_apart=apart,
            without_dp=comparison.without_dp,
            batch_size=batch_size,
            record=record,
            memory=memory_over_time(record, simulation.workload, memory, sizes=simulation.sizes),
            peaks_bytes=long_run_peaks_bytes(simulation, memory),
            rooms=rooms,
        )

    def values(self) -> dict[str, Any]:
        """Entries of ``result.json``; a comparison with data parallelism if that is simulated."""
        pace, dp, apart = self.pace, self.dp, self.dp_apart
        busy_share = sum(pace.busy) / len(pace.busy)
        beside: dict[str, float] = {}
        if dp is not None and apart is not None:
            beside = {
                "dp_minibatch_s": dp.minibatch_s,
                "dp_epoch_s": dp.total_s,
                "speedup_over_dp": dp.minibatch_s / pace.minibatch_s,
                "epoch_speedup_over_dp": dp.total_s / pace.total_s,
                "dp_without_overlap_minibatch_s": apart.minibatch_s,
                "speedup_over_dp_without_overlap": apart.minibatch_s / pace.minibatch_s,
            }
        return {
            "kind": "simulated",
            "simulated_shapes_per_s": self.batch_size / pace.minibatch_s,
            "minibatches_per_s": 1 / pace.minibatch_s,
            "minibatch_s": pace.minibatch_s,
            "epoch_s": pace.total_s,
            "epoch_minibatches": pace.minibatches,
            "shapes_per_minibatch": self.batch_size,
            **beside,
            "busy_share": busy_share,
            "bubble_share": 1 - busy_share,
            "device_peak_bytes": max(self.peaks_bytes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each device."""
        ranks = [
            (rank, device, number, stage.layers)
            for number, stage in enumerate(self.plan.stages)
            for rank, device in zip(self.plan.ranks_of(number), stage.devices, strict=True)
        ]
        return [
            {
                "rank": rank,
                "device": device,
                "stage": stage,
                "first_layer": layers[0],
                "last_layer": layers[1],
                "busy_share": self.pace.busy[rank],
                "bubble_share": 1 - self.pace.busy[rank],
                "peak_bytes": self.peaks_bytes[rank],
                "memory_bytes": self.rooms[rank],
                "kind": "simulated",
            }
            for rank, device, stage, layers in ranks
        ]

    def table(self) -> str:
        """The devices and the pace in words and figures; of many devices the first ones."""
        head = ("device", "stage", "layers", "busy", "idle", "peak memory MiB")
        rows = self.rows()
        cells = [
            (
                row["device"],
                str(row["stage"]),
                f"{row['first_layer']}-{row['last_layer']}",
                f"{row['busy_share']:.1%}",
                f"{row['bubble_share']:.1%}",
                f"{row['peak_bytes'] / 2**20:,.0f}",
            )
            for row in rows[:_LISTED]
        ]
        lines = [f"{in_short(self.plan)}, simulated", markdown_table(head, cells)]
        if len(rows) > _LISTED:
            lines.append(f"and {len(rows) - _LISTED:,} more, in devices.csv")
        values = self.values()
        lines.append(
            f"{values['minibatches_per_s']:.4g} minibatches/s, "
            f"{values['simulated_shapes_per_s']:.4g} samples/s; an epoch of "
            f"{self.pace.minibatches} minibatches takes {self.pace.total_s:.4g} s"
        )
        if self.dp is None:
            return "\n".join([*lines, f"not compared with data parallelism: {self.without_dp}"])
        sums = "overlap with the backward" if self.dp_overlaps else "follow the backward"
        lines.append(
            f"{values['speedup_over_dp']:.2f}x as fast as data parallelism on all devices of the "
            f"hardware, whose sums {sums} ({values['epoch_speedup_over_dp']:.2f}x over the epoch)"
        )
        if self.dp_overlaps:
            lines.append(
                f"{values['speedup_over_dp_without_overlap']:.2f}x as fast as data parallelism "
                "whose sums follow the backward"
            )
        return "\n".join(lines)


def in_short(plan: Plan) -> str:
    """The replicas of a plan's stages, if these are not too many to be listed."""
    if plan.num_stages <= _LISTED:
        return plan.config
    return f"{plan.num_stages:,} stages on {plan.num_ranks:,} devices"


def write_figures(figures: SimulationFigures, directory: RunDir, *, title: str) -> None:
    """Logs the table, and writes it with plan, devices, picture and trace; warns of devices with
    less memory than needed.
    """
    path, plan, record, rows = directory.path, figures.plan, figures.record, figures.rows()
    table = figures.table()
    log.info("%s", table)
    short = [
        f"{row['device']} would need {row['peak_bytes'] / 2**20:.0f} MiB of memory and has "
        f"{row['memory_bytes'] / 2**20:.0f}"
        for row in rows
        if row["memory_bytes"] is not None and row["peak_bytes"] > room_bytes(row["memory_bytes"])
    ]
    for words in short[:_LISTED]:
        log.warning("%s", words)
    if len(short) > _LISTED:
        log.warning("and so would %d more, see devices.csv", len(short) - _LISTED)
    write_text_atomic(path / "simulation.txt", table + "\n")
    write_csv(path / "devices.csv", rows)
    trace = trace_text(plan, record.all_spans, memory=figures.memory)
    write_text_atomic(path / "trace.json", trace)
    ranks = some_ranks(plan, _DRAWN)
    if len(ranks) < plan.num_ranks:
        title = f"{title} ({len(ranks)} of {plan.num_ranks:,} devices)"
    names = [f"stage {row['stage']}: {row['device']}" for row in rows]
    drawn = lanes(plan, record.all_spans, ranks=ranks, names=names, least=record.end_s / _SEEN)
    in_seconds = record.end_s >= _SECONDS_FROM_S
    figure = timelines_figure(
        {title: drawn},
        unit=1.0 if in_seconds else 1e-3,
        unit_name="seconds" if in_seconds else "milliseconds",
        max_width_in=_PICTURE_IN,
    )
    style.save_png(figure, path / "timeline.png")
    write_text_atomic(directory.plan, plan.to_json())
