"""The task ``simulate``: how fast a plan would train, without training it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.inventory import joined_by, joined_where_missing
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import MICROBATCHES_KEY, SearchChoice
from sparsepipe.errors import ConfigError, HardwareError, ProfileError
from sparsepipe.partition.activation_checkpointing.setting import spans_in_plan
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.planning.device_profiles import (
    as_loaded,
    check_batch_sizes,
    fingerprint_of,
    fingerprint_of_text,
    load_profiles,
    log_differences,
)
from sparsepipe.planning.division import division_of
from sparsepipe.planning.plan_resolution import data_parallel, plan_to_simulate
from sparsepipe.planning.recomputation import refuse_recompute
from sparsepipe.planning.search import memory_model
from sparsepipe.plots import style
from sparsepipe.plots.timeline import lanes, some_ranks, timelines_figure
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.schedule.communication import INBOX_DEPTH
from sparsepipe.simulate.engine import Record, Setting
from sparsepipe.simulate.memory import Level, long_run_peaks_bytes, memory_over_time
from sparsepipe.simulate.network import Algorithm, ClusterNetwork, Sends
from sparsepipe.simulate.simulation import SCHEDULES, Pace, Simulation
from sparsepipe.simulate.trace import trace_text
from sparsepipe.simulate.workload import Workload
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.simulate_domains import Domains, check_parallel
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import markdown_table, write_csv, write_text_atomic

log = logging.getLogger(__name__)

_BUCKET_MIB = 25  # DDP's default
_LISTED = 32  # most devices that are listed, drawn and warned about; devices.csv has all
_SEEN = 1000  # spans below 1/1000 of the time would be mere lines in the picture
_SECONDS_FROM_S = 2.0  # pictures at least this long are in seconds, others in milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(Task):
    """Simulates an epoch; writes its speed, devices' idle shares and memory, a picture and a trace.

    ``conf/task/simulate.yaml`` describes the settings.
    """

    cores: ClassVar[int | None] = 1
    chooses_devices: ClassVar[bool] = True
    not_identity: ClassVar[tuple[str, ...]] = (
        "parallel",
        "task.parallel.devices",
        "task.parallel.grace_s",
        "task.parallel.max_restarts",
        "task.parallel.num_nodes",
        "task.parallel.plan",
        "task.parallel.search",
        "task.parallel.strategy.timeout_s",
        "task.profiles",
    )

    parallel: dict[str, Any]
    minibatches: Annotated[int, Field(ge=1)] = 154
    schedule: str | None = None
    microbatches: int | None = None
    overlap: bool | None = None
    all_reduce: Literal["ring", "direct", "chain", "ordered"] | None = None
    outbox: int | None = None
    inbox: int | None = INBOX_DEPTH
    link_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    profiles: dict[str, str] | None = None
    timeline_minibatches: Annotated[int, Field(ge=1)] = 12

    def run(self, run: ResolvedRun) -> None:
        """Simulates in one process, and writes the results."""
        spec = run.spec.replace(parallel=self.parallel)
        parallel, inventory = spec.parallel, joined_by(run.inventory, self.link_bytes_per_s)
        if parallel.roles is not None:
            names = ("schedule", "microbatches", "overlap", "outbox")
            check_parallel(parallel, others={name: getattr(self, name) for name in names})
            profiles = self._profiles(spec, inventory)
            size, algorithm = _batch_size(profiles, spec), self.all_reduce or "ordered"
            domains = Domains.of(inventory, profiles, batch_size=size, algorithm=algorithm)
            many = {"minibatches": self.minibatches, "shown": self.timeline_minibatches}
            write_result(run, domains.write(run.directory, **many))
            return
        if (search := spec.plan_search) is not None:  # it may set the bandwidth of all links
            inventory = joined_where_missing(inventory, search.bandwidth_bytes_per_s)
        division, synchronous = division_of(spec), parallel.synchronous
        refuse_recompute(spec, inventory, division)
        profiles = self._profiles(spec, inventory)
        plan = plan_to_simulate(spec, division, inventory, profiles)
        schedule = self.schedule or (synchronous.schedule if synchronous else "asynchronous")
        comparison = self._comparison(spec, plan, inventory, profiles, schedule=schedule)
        room = {(h.name, d.name): d.memory_bytes for h in inventory.hosts for d in h.devices}
        devices = [device for stage in plan.stages for device in stage.devices]
        # The memory model of the search, even if the search ignores memory.
        memory = memory_model(replace(search or SearchChoice(), memory=True), spec)
        assert memory is not None
        figures = SimulationFigures.of(
            comparison,
            minibatches=self.minibatches,
            shown=self.timeline_minibatches,
            memory=memory,
            batch_size=_batch_size(profiles, spec),
            rooms=[room[host, name] for host, name, _ in (d.split("/") for d in devices)],
        )
        told = "an epoch counts as task.minibatches=%d minibatches, whatever the size of the data"
        log.info(told, self.minibatches)
        if parallel.is_data_parallel:
            title = f"Data parallelism on {plan.num_ranks} devices, simulated"
        else:
            strategy = plan.details.get("strategy")
            by = f"{strategy}, " if strategy else ""
            title = f"{by}{_in_short(plan)}: {schedule} schedule, simulated"
        figures.write(run.directory, title=title)
        again = plan.details.get("recomputed") if comparison.plan.recipe.splits else None
        about_plan = {
            "schedule": schedule,
            "microbatches": comparison.plan.microbatches,
            "plan_config": plan.config,
            "plan_cuts": list(plan.cuts),
            "plan_devices": devices,
            **({"recomputed_layers": again} if again else {}),
        }
        write_result(run, {**figures.values(), **about_plan})

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """Returns the configuration for a single process, however many devices are simulated."""
        return in_one_process(spec)

    def prepare(self, run: ResolvedRun) -> str:
        """Returns a fingerprint of the plan or the search, and of the profiles."""
        spec, inventory = run.spec.replace(parallel=self.parallel), run.inventory
        division, search = division_of(spec), spec.plan_search
        given = self._given(spec)
        words = {
            "profiles": fingerprint_of(inventory, spec.model.name, given=given, spec=spec),
            "plan": None if division is None else [division.arguments(), division.devices],
            "search": None if search is None else {**asdict(search), "profiles": None},
        }
        return fingerprint_of_text(json.dumps(words, sort_keys=True))

    def _given(self, spec: RunSpec) -> dict[str, str]:
        """Returns profile files by device name: of ``task.profiles``, else of the search."""
        searched = (spec.search.profiles if spec.search is not None else None) or {}
        return {**searched, **(self.profiles or {})}

    def _profiles(self, spec: RunSpec, inventory: Inventory) -> dict[str, Profile]:
        """Returns the profiles by device name; logs where their workload differs from the run's."""
        model, given = spec.model, self._given(spec)
        found = load_profiles(inventory, model.name, given=given, settings=model.settings)
        check_batch_sizes(found)
        log_differences(found, spec, inventory)
        return as_loaded(found, spec, inventory)

    def _comparison(
        self,
        spec: RunSpec,
        plan: Plan,
        inventory: Inventory,
        profiles: Mapping[str, Profile],
        *,
        schedule: str,
    ) -> Comparison:
        """Prepares simulations of a plan and, to compare it, of data parallelism on all devices."""
        parallel, is_dp = spec.parallel, spec.parallel.is_data_parallel
        if is_dp and schedule != "asynchronous":
            raise ConfigError(
                f"task.schedule={schedule} is for pipelines, not for data parallelism",
                remedy="leave task.schedule out, or choose parallel=hete_mp, mp, exact or pipeline",
            )
        bucket_bytes = (parallel.argument("bucket_cap_mb") or _BUCKET_MIB) * 2.0**20

        def setting(on: Plan, algorithm: Algorithm, *, as_dp: bool) -> Setting:
            overlaps = as_dp if self.overlap is None else self.overlap
            return Setting(
                network=ClusterNetwork.of(inventory, on),
                sends=Sends(outbox=self.outbox, inbox=self.inbox),
                algorithm=algorithm,
                bucket_bytes=bucket_bytes if overlaps else None,
            )

        workload = Workload.of(plan, profiles, mode=parallel.argument("mode", "stash"))
        parts, option = self.microbatches, "task.microbatches"
        if schedule in SCHEDULES and SCHEDULES[schedule].splits:
            workload = workload.recomputing(spans_in_plan(plan), profiles)
            if parts is None and parallel.synchronous is not None:
                parts, option = parallel.synchronous.microbatches, MICROBATCHES_KEY
        algorithm: Algorithm = self.all_reduce or ("ring" if is_dp else "ordered")
        simulated = Simulation.of(
            workload,
            setting(plan, algorithm, as_dp=is_dp),
            schedule=schedule,
            microbatches=parts,
            option=option,
        )
        everywhere = data_parallel(inventory, plan.num_layers)
        ring: Algorithm = algorithm if is_dp else "ring"
        try:
            dp = Simulation.of(
                Workload.of(everywhere, profiles), setting(everywhere, ring, as_dp=True)
            )
        except (HardwareError, ProfileError) as error:  # of devices that the plan does not use
            return Comparison(plan=simulated, dp=None, dp_apart=None, without_dp=error.message)
        apart = replace(dp, setting=replace(dp.setting, bucket_bytes=None))
        return Comparison(plan=simulated, dp=dp, dp_apart=apart)


def _batch_size(profiles: Mapping[str, Profile], spec: RunSpec) -> int:
    """Returns the batch size of the profiles, or of the data if the profiles have none."""
    sizes = [profile.meta.get("batch_size") for profile in profiles.values()]
    return int(next((size for size in sizes if size), spec.data.get("batch_size")))


def in_one_process(spec: RunSpec) -> RunSpec:
    """Returns the configuration with ``parallel`` replaced by the settings of one process."""
    parallel = {
        "devices": 1,
        "num_nodes": 1,
        "grace_s": spec.parallel.grace_s,
        "max_restarts": 0,
        "strategy": None,
        "plan": None,
        "search": None,
    }
    return spec.replace(parallel=parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Simulations of a plan and, for comparison, of data parallelism on all devices.

    Attributes:
        plan: that of the plan, with its schedule.
        dp: data parallelism, whose sums may overlap with the backward; None: cannot be simulated.
        dp_apart: data parallelism whose sums follow the backward; None if ``dp`` is None.
        without_dp: why data parallelism cannot be simulated; empty if it can.
    """

    plan: Simulation
    dp: Simulation | None
    dp_apart: Simulation | None
    without_dp: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationFigures:
    """Results for a plan and for data parallelism. See :class:`Comparison`.

    Attributes:
        plan: the stages and their devices.
        pace: the plan's pace over an epoch; ``dp`` and ``dp_apart``: that of data parallelism.
        dp_overlaps: whether sums of data parallelism overlap with the backward.
        batch_size: number of shapes in a minibatch.
        record: what ranks do in the first minibatches, after which the pipeline is drained.
        memory: each rank's memory over time during ``record``.
        peaks_bytes: each rank's peak memory in a long training.
        rooms: bytes of memory of each rank's device; None: unknown.
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
        """Simulates an epoch of ``minibatches``, of which ``record`` has the first ``shown``."""
        simulation = comparison.plan
        record = simulation.record(ceil(shown / simulation.batches))
        # A profile is of the batch of one first-stage device; a synchronous step joins several.
        found = simulation.pace(ceil(minibatches / simulation.batches))
        minibatch_s = found.minibatch_s / simulation.batches
        pace = replace(found, minibatches=minibatches, minibatch_s=minibatch_s)
        dp = apart = None
        if comparison.dp is not None and comparison.dp_apart is not None:
            dp = pace if comparison.dp == simulation else comparison.dp.pace(minibatches)
            overlaps = comparison.dp != comparison.dp_apart
            apart = comparison.dp_apart.pace(minibatches) if overlaps else dp
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
        """Returns entries for ``result.json``, with a comparison if ``dp`` is not None."""
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
        """Returns the rows of ``devices.csv``, one for each device."""
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
        """Formats a table of at most 32 devices, and lines on the speed, as text."""
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
        lines = [f"{_in_short(self.plan)}, simulated", markdown_table(head, cells)]
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

    def write(self, directory: RunDir, *, title: str) -> None:
        """Logs the table, warns about devices with less memory than needed, and writes table, plan,
        devices, picture and trace.
        """
        path, plan, record, rows = directory.path, self.plan, self.record, self.rows()
        table = self.table()
        log.info("%s", table)
        for row in rows[:_LISTED]:
            needed, room = row["peak_bytes"], row["memory_bytes"]
            if room is not None and needed > room_bytes(room):
                told = "%s would need %.0f MiB of memory, but has %.0f"
                log.warning(told, row["device"], needed / 2**20, room / 2**20)
        write_text_atomic(path / "simulation.txt", table + "\n")
        write_csv(path / "devices.csv", rows)
        trace = trace_text(plan, record.all_spans, memory=self.memory)
        write_text_atomic(path / "trace.json", trace)
        ranks = some_ranks(plan, _LISTED)
        if len(ranks) < plan.num_ranks:
            title = f"{title} ({len(ranks)} of {plan.num_ranks:,} devices)"
        names = [f"stage {row['stage']}: {row['device']}" for row in rows]
        drawn = lanes(plan, record.all_spans, ranks=ranks, names=names, least=record.end_s / _SEEN)
        in_seconds = record.end_s >= _SECONDS_FROM_S
        figure = timelines_figure(
            {title: drawn},
            unit=1.0 if in_seconds else 1e-3,
            unit_name="seconds" if in_seconds else "milliseconds",
            max_width_in=24.0,
        )
        style.save_png(figure, path / "timeline.png")
        write_text_atomic(directory.plan, plan.to_json())


def _in_short(plan: Plan) -> str:
    """Returns the plan's config such as ``2-1``; above 32 stages, numbers of stages and devices."""
    if plan.num_stages <= _LISTED:
        return plan.config
    return f"{plan.num_stages:,} stages on {plan.num_ranks:,} devices"
