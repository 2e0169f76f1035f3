"""The task ``simulate`` for ``parallel=domain``: ranks' costs, from profiles, and their speed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.schema import Parallel
from sparsepipe.domains import Placement, sent_numbers
from sparsepipe.errors import ConfigError, ProfileError
from sparsepipe.planning.plan_resolution import data_parallel
from sparsepipe.plots import style
from sparsepipe.plots.timeline import lanes, timelines_figure
from sparsepipe.profiling import Profile
from sparsepipe.profiling.profile import LayerProfile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.simulate.domains import DomainSteps, GradientSum, RankCosts
from sparsepipe.simulate.network import Algorithm, ClusterNetwork
from sparsepipe.simulate.trace import trace_text
from sparsepipe.tasks.domain_parts import LOSSES, private_part
from sparsepipe.utils.files import markdown_table, write_csv, write_text_atomic

log = logging.getLogger(__name__)

_NUMBER_BYTES = 4  # profiles are measured in float32
_ABOUT = ("domains", "code", "target_numbers")


def check_parallel(parallel: Parallel, *, others: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a grid, separate roles, or a setting in ``others`` that is set."""
    if parallel.grid is not None or parallel.roles != "equal":
        which = "parallel.grid" if parallel.grid is not None else "parallel.roles=separate"
        raise ConfigError(
            f"task=simulate cannot predict how long domains with {which} take",
            remedy="simulate parallel.roles=equal without a grid, or train with task=train",
        )
    if given := [name for name, value in others.items() if value]:
        raise ConfigError(
            f"task.{given[0]} is for pipelines or data parallelism, not for parallel=domain",
            remedy=f"leave task.{given[0]} out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Domains:
    """A training on several domains, distributed over the devices of an inventory.

    Attributes:
        placement: the domains of each rank.
        plan: one stage with a replica for each rank.
        steps: simulates the ranks' steps.
        alone_s: seconds of a step with all domains on the fastest device alone.
        samples: number of samples in a minibatch of all ranks.
        samples_alone: number of samples in a minibatch with all domains on one device.
    """

    placement: Placement
    plan: Plan
    steps: DomainSteps
    alone_s: float
    samples: int
    samples_alone: int

    @classmethod
    def of(
        cls,
        inventory: Inventory,
        profiles: Mapping[str, Profile],
        *,
        batch_size: int,
        algorithm: Algorithm,
    ) -> Domains:
        """Distributes domains over the devices; ``batch_size`` counts one domain's samples."""
        plan = data_parallel(inventory, 1)
        devices = plan.stages[0].devices
        own = [_profile_of(device, profiles) for device in devices]
        about = own[0].meta
        first, *others = ([each.meta[key] for key in _ABOUT] for each in own)
        if different := [each for each in others if each != first]:
            raise ProfileError(
                f"profiles differ in domains ({', '.join(first[0])}; "
                f"{', '.join(different[0][0])}) or in the sizes of codes or samples",
                remedy="measure the same model and data on all devices (task=profile)",
            )
        placement = Placement(tuple(about["domains"]), len(devices))
        samples = [batch_size * len(placement.domains_of(rank)) for rank in range(len(devices))]
        numbers = {"code": int(about["code"]), "target": int(about["target_numbers"])}
        all_alone = batch_size * len(placement.domains)
        costs = tuple(
            _costs(
                profile,
                placement.domains_of(rank),
                more_codes=sum(samples) / all_alone,
                sent_bytes=sent_numbers(placement, rank, samples=samples, **numbers)
                * _NUMBER_BYTES
                / max(placement.ranks - 1, 1),
            )
            for rank, profile in enumerate(own)
        )
        private = [
            GradientSum(ranks=ranks, num_bytes=_part(own[0], private_part(name)).parameter_bytes)
            for name in placement.domains
            if len(ranks := placement.ranks_of(name)) > 1
        ]
        shared = sum(each.parameter_bytes for each in own[0].layers if not _is_private(each))
        steps = DomainSteps(
            plan=plan,
            network=ClusterNetwork.of(inventory, plan),
            costs=costs,
            shared=GradientSum(ranks=tuple(range(len(devices))), num_bytes=shared),
            private=tuple(private),
            algorithm=algorithm,
        )
        alone = [profile.compute_s + (profile.update_s or 0.0) for profile in own]
        return cls(
            placement=placement,
            plan=plan,
            steps=steps,
            alone_s=min(alone),
            samples=sum(samples),
            samples_alone=all_alone,
        )

    def values(self, *, minibatches: int) -> dict[str, Any]:
        """Returns entries for ``result.json``, for an epoch of ``minibatches``."""
        minibatch_s = self.steps.minibatch_s()
        busy = [each.busy_s / minibatch_s for each in self.steps.costs]
        rate, alone = self.samples / minibatch_s, self.samples_alone / self.alone_s
        return {
            "kind": "simulated",
            "schedule": "domains",
            "simulated_shapes_per_s": rate,
            "minibatches_per_s": 1 / minibatch_s,
            "minibatch_s": minibatch_s,
            "epoch_s": minibatches * minibatch_s,
            "epoch_minibatches": minibatches,
            "shapes_per_minibatch": self.samples,
            "one_device_shapes_per_s": alone,
            "speedup_over_one_device": rate / alone,
            "busy_share": sum(busy) / len(busy),
            "bubble_share": 1 - sum(busy) / len(busy),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of ``devices.csv``, one for each rank."""
        minibatch_s, peers = self.steps.minibatch_s(), self.placement.ranks - 1
        return [
            {
                "rank": rank,
                "device": device,
                "domains": " ".join(self.placement.domains_of(rank)),
                "busy_share": costs.busy_s / minibatch_s,
                "sent_bytes": costs.sent_bytes * peers,
                "kind": "simulated",
            }
            for rank, (device, costs) in enumerate(
                zip(self.plan.stages[0].devices, self.steps.costs, strict=True)
            )
        ]

    def write(self, directory: RunDir, *, minibatches: int, shown: int) -> dict[str, Any]:
        """Writes table, devices, picture and trace (``shown`` steps); returns :meth:`values`."""
        values, rows = self.values(minibatches=minibatches), self.rows()
        head = ("device", "domains", "busy", "sent codes KiB")
        cells = [
            (
                row["device"],
                row["domains"],
                f"{row['busy_share']:.1%}",
                f"{row['sent_bytes'] / 1024:,.0f}",
            )
            for row in rows
        ]
        pace = (
            f"{values['minibatches_per_s']:.4g} minibatches/s, "
            f"{values['simulated_shapes_per_s']:.4g} samples/s, "
            f"{values['speedup_over_one_device']:.2f}x as many as all domains on one device"
        )
        table = "\n".join(["domains over ranks, simulated", markdown_table(head, cells), pace])
        log.info("%s", table)
        record = self.steps.record(shown)
        write_text_atomic(directory.path / "simulation.txt", table + "\n")
        write_csv(directory.path / "devices.csv", rows)
        trace = trace_text(self.plan, record.all_spans)
        write_text_atomic(directory.path / "trace.json", trace)
        names = [f"{row['device']}: {row['domains']}" for row in rows]
        least_s = record.end_s / 1000  # shorter spans would be mere lines
        drawn = lanes(self.plan, record.all_spans, names=names, least=least_s)
        figure = timelines_figure(
            {f"Domains on {len(rows)} devices, simulated": drawn},
            unit=1e-3,
            unit_name="milliseconds",
            max_width_in=24.0,
        )
        style.save_png(figure, directory.path / "timeline.png")
        return values


def _profile_of(device: str, profiles: Mapping[str, Profile]) -> Profile:
    name = device.split("/")[1]
    found = profiles.get(name)
    if found is None or "domains" not in found.meta:
        what = "of the network" if found is None else "whose network has domains"
        raise ProfileError(
            f"{name} has no profile {what}",
            remedy="measure it with task=profile on the same model and data, and name the file: "
            f"'task.profiles={{{name}: profile.json}}'",
        )
    return found


def _costs(
    profile: Profile, domains: tuple[str, ...], *, more_codes: float, sent_bytes: float
) -> RankCosts:
    losses = _part(profile, LOSSES)
    own = [part for part in profile.layers if part.name.partition("/")[2] in domains]
    updated = [part for part in profile.layers if part in own or not _is_private(part)]
    return RankCosts(
        encode_s=sum(part.forward_s for part in own),
        losses_s=(losses.forward_s + losses.backward_s) * more_codes,
        backward_s=sum(part.backward_s for part in own),
        update_s=sum(part.update_s or 0.0 for part in updated),
        sent_bytes=sent_bytes,
    )


def _part(profile: Profile, name: str) -> LayerProfile:
    return next(part for part in profile.layers if part.name == name)


def _is_private(part: LayerProfile) -> bool:
    return part.name.startswith(private_part(""))
