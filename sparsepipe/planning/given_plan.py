"""The plan that a simulation runs: that of ``parallel``, on the devices of the inventory."""

from __future__ import annotations

from collections.abc import Mapping

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.places import named_places, places
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError, HardwareError, PlanError, SparsePipeError
from sparsepipe.planning.division import Division
from sparsepipe.planning.search import find_plan, recomputing
from sparsepipe.profiling import Profile, check_there
from sparsepipe.schedule import Plan, Stage


def plan_to_simulate(
    spec: RunSpec,
    division: Division | None,
    inventory: Inventory,
    profiles: Mapping[str, Profile],
) -> Plan:
    """The plan, its devices named ``host/model/number``; its details list what is recomputed.

    Raises:
        ConfigError: there is nothing to simulate.
        PlanError: the plan is none of a chain of these layers, or for other devices.
        ProfileError: a device has no profile, or they are of different models.
        HardwareError: a link that the search needs has no bandwidth.
    """
    num_layers = _num_layers(profiles)
    if spec.parallel.grid is not None:
        raise ConfigError(
            "nothing predicts how long spatial parallelism takes",
            remedy="choose parallel=dp, mp, hete_mp, exact or pipeline, or train with task=train",
        )
    if spec.parallel.is_data_parallel:
        return data_parallel(inventory, num_layers)
    if (choice := spec.search) is not None:
        try:
            return find_plan(choice, spec, inventory, profiles).plan
        except SparsePipeError as error:
            error.remedy = error.remedy.replace("task.", "parallel.search.")
            raise
    if division is None:
        raise ConfigError(
            "there is one device to simulate, and nothing that it would wait for",
            remedy="choose parallel=dp, mp, hete_mp, exact or pipeline",
        )
    if division.grids is not None:
        raise ConfigError(
            "nothing predicts how long a stage that is a grid takes",
            remedy="give a plan without grids, or train with task=train",
        )
    if not profiles:  # which know how many layers there are
        check_there((device.name for host in inventory.hosts for device in host.devices), profiles)
    plan = _by_hand(division, inventory, num_layers)
    return recomputing(plan, spec, inventory, profiles)


def data_parallel(inventory: Inventory, num_layers: int) -> Plan:
    """One stage on all devices, host after host, as a ring over them goes best."""
    devices = tuple(place.text for place in places(inventory))
    return Plan(stages=(Stage(layers=(0, num_layers - 1), devices=devices),))


def _num_layers(profiles: Mapping[str, Profile]) -> int:
    if any(profile.states for profile in profiles.values()):
        raise PlanError(
            "a profile is of a branching graph, whose stages end at its states",
            remedy="profile the model with task=profile, which takes it for a chain of layers",
        )
    counts = [profile.num_layers for profile in profiles.values()]
    return max(counts, default=1)  # missing and different ones are reported later


def _by_hand(division: Division, inventory: Inventory, num_layers: int) -> Plan:
    """The plan of ``parallel.plan``: a file, or config and cuts."""
    cuts = division.cuts
    config = division.config
    if config is None and cuts is not None:
        config = "-".join("1" for _ in range(len(cuts) + 1))
    if config is None or (cuts is None and "-" in config):
        raise PlanError(
            "parallel.plan has no cuts: equal shares of the FLOPs are counted on batches of data, "
            "which a simulation has none of",
            remedy="give parallel.plan.cuts, such as [24], or parallel.plan.file, or let a search "
            "find them (parallel=hete_mp)",
        )
    division.check(num_layers=num_layers)
    made = Plan.of(config=config, cuts=cuts or (), num_layers=num_layers)
    with division.naming_file():
        devices = iter(_devices(division, inventory, made.num_ranks))
    return Plan(
        stages=tuple(
            Stage(layers=stage.layers, devices=tuple(next(devices) for _ in stage.devices))
            for stage in made.stages
        ),
        details=division.details,
    )


def _devices(division: Division, inventory: Inventory, ranks: int) -> list[str]:
    """Those that the plan names; else the first ones of the inventory, as ranks take them."""
    there = [place.text for place in places(inventory)]
    if ranks > len(there):
        raise HardwareError(
            f"the plan is for {ranks} devices, the inventory has {len(there)}",
            remedy="give parallel.plan fewer devices, or choose another hardware",
        )
    named = named_places(inventory, division.devices or ())
    if named is not None and len({*named}) == len(named):
        return [place.text for place in named]
    if others := [name for name in division.devices or () if "/" in name]:
        raise PlanError(
            f"the plan is for {', '.join(others)}, and the inventory has {', '.join(there)}",
            remedy="choose the hardware that the plan was made for, or give its config and cuts "
            "as parallel.plan.config and parallel.plan.cuts",
        )
    return there[:ranks]
