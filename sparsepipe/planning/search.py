"""A plan for a configuration, found by the chosen search from profiles and the hardware.

``task=partition`` writes the plan; a training with ``parallel=hete_mp`` finds it first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.places import places
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import SearchChoice
from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.selection import choose_spans
from sparsepipe.partition.activation_checkpointing.setting import with_spans
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.explanation import Explanation, as_plan, explain
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.problem import Problem, Solution
from sparsepipe.partition.search.algorithms import Search, search_by_name
from sparsepipe.partition.search.baselines import mp_by_levels
from sparsepipe.partition.search.checkpointed_stages import recomputation_of
from sparsepipe.planning.device_profiles import as_loaded, draw_shares, fingerprint_of_text
from sparsepipe.planning.recomputation import given_spans, log_chosen, synchronous_stages_of
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.utils.files import markdown_table, write_csv, write_text_atomic

log = logging.getLogger(__name__)


_ALIKE = ("mp", "variance")
"""Searches that treat all devices as equal to one, which ``device`` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """The result of a search.

    Attributes:
        plan: the plan, for a plan file and for training.
        explanation: the plan's expected times and memory.
        profiles: the devices' profiles, by device name, in the inventory's order.
    """

    plan: Plan
    explanation: Explanation
    profiles: Mapping[str, Profile]

    def write(self, directory: RunDir) -> None:
        """Writes the plan as text, CSV and picture to a run's directory, and last the plan file."""
        write_text_atomic(directory.plan_table, plan_table(self.explanation) + "\n")
        write_csv(directory.plan_figures, [asdict(row) for row in self.explanation.rows])
        draw_shares(self.profiles, directory.shares, cuts=self.plan.cuts)
        write_text_atomic(directory.plan, self.plan.to_json())


def find_plan(
    choice: SearchChoice,
    spec: RunSpec,
    inventory: Inventory,
    profiles: Mapping[str, Profile],
    **origin: object,
) -> FoundPlan:
    """The best plan for the model on the hardware; ``origin`` are further entries of its details.

    For a synchronous pipeline, memory covers what its microbatches keep, and recomputed layers
    count in the memory and the times of stages. With ``recompute=auto``, each stage recomputes the
    cheapest layers with which it fits. The plan's details list the recomputed layers.

    Raises:
        ConfigError: a setting does not suit the search, the layers named to recompute do not suit
            the plan, or a search that ignores the memory of single devices finds a plan that does
            not fit.
        ProfileError: a profile is missing, or profiles are of different models.
        HardwareError: a needed link has no bandwidth.
        PlanError: no plan fits the memory, or the problem is not one that the search can solve.
    """
    problem = _problem_of(choice, spec, inventory, profiles)
    device = choice.device
    if choice.search in _ALIKE and device is None:
        kinds = [kind.name for kind in problem.pool.kinds]
        total_s = [float(compute_s_I[-1]) for compute_s_I in problem.spans.compute_s_KI]
        device = kinds[total_s.index(min(total_s))]
        if len({*kinds}) > 1:
            told = "%s treats all devices as equal to the fastest by its profile: %s"
            log.info(told, choice.search, device)
    solution = _solve(problem, choice, device=device)
    chosen = None
    if problem.synchronous is not None:  # no branching graph
        chosen = recomputation_of(solution.stages, problem, solution.spans)
        if problem.synchronous.setting == "auto":
            log_chosen(chosen)
    explanation = explain(problem, solution, chosen)
    counts = {f"{host.name}/{d.name}": d.count for host in inventory.hosts for d in host.devices}
    known: dict[str, object] = {
        "model": spec.model.name,
        "search": choice.search,
        "device": device,
        "levels": choice.levels,
        "bandwidth_bytes_per_s": choice.bandwidth_bytes_per_s,
        "memory": None if problem.memory is None else asdict(problem.memory),
        "inventory": {"fingerprint": inventory.fingerprint(), "devices": counts},
        "profiles": {
            name: {
                "fingerprint": fingerprint_of_text(profiles[name].to_json()),
                "source": profiles[name].meta.get("source"),
            }
            for name in sorted(profiles)
        },
    }
    names = dict.fromkeys(kind.name for kind in problem.pool.kinds)
    return FoundPlan(
        plan=as_plan(problem, explanation, **known, **origin),
        explanation=explanation,
        profiles={name: profiles[name] for name in names},
    )


def _problem_of(
    choice: SearchChoice, spec: RunSpec, inventory: Inventory, profiles: Mapping[str, Profile]
) -> Problem:
    """The search's problem, with the memory and the costs that the configuration implies."""
    synchronous = synchronous_stages_of(spec.parallel, profiles)
    automatic = synchronous is not None and synchronous.setting == "auto"
    if automatic and not choice.memory:
        log.warning("recompute=auto depends on memory: the search counts it despite memory=false")
        choice = replace(choice, memory=True)
    memory = memory_model(choice, spec)
    if synchronous is not None and memory is not None:
        memory = replace(memory, stash=False, predicted=False)
    counted = as_loaded(profiles, spec, inventory)
    for name, what in (("update_s", "the optimizer's update"), ("load_s", "reading a batch")):
        unknown = [device for device, own in counted.items() if getattr(own, name) is None]
        if 0 < len(unknown) < len(counted):
            devices = ", ".join(unknown)
            log.warning("no time of %s in the profile of %s: it counts as 0", what, devices)
    return Problem.of(
        inventory,
        counted,
        model=cost_model(choice.cost_model),
        memory=memory,
        bandwidth_bytes_per_s=choice.bandwidth_bytes_per_s,
        synchronous=synchronous,
    )


def memory_model(choice: SearchChoice, spec: RunSpec) -> MemoryModel | None:
    """The memory model, by the search's settings or, where these are None, the training's; None:
    the search ignores memory.
    """
    if not choice.memory:
        return None
    mode, optimizer = spec.parallel.argument("mode"), spec.optim.optimizer
    stashes = mode != "none" and spec.parallel.synchronous is None
    state_bytes = 1.0 if optimizer.name == "SGD" else 2.0  # as for Adam
    if optimizer.name == "SGD" and not optimizer.get("momentum"):
        state_bytes = 0.0
    return MemoryModel(
        stash=stashes if choice.stash is None else choice.stash,
        predicted=mode == "spectrain",
        optimizer=state_bytes if choice.optimizer_bytes is None else choice.optimizer_bytes,
        reserved_bytes=choice.reserved_bytes,
    )


def _solve(problem: Problem, choice: SearchChoice, *, device: str | None) -> Solution:
    """Runs the chosen search with its options, and refuses options that it does not use."""
    search = choice.search
    assert search is not None, "the plan is given"
    given = {
        "order": choice.order != "by_count" and search != "hete_mp",
        "device": choice.device is not None and search not in _ALIKE,
        "levels": choice.levels and search != "mp",
    }
    if unused := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"the search {search} does not use {', '.join(unused)}",
            remedy="leave out "
            + ", ".join(f"task.{name}" for name in unused)
            + "; hete_mp uses order, mp uses device and levels, variance uses device",
        )
    found: Search = mp_by_levels if choice.levels else search_by_name(search)
    if search == "hete_mp":
        return found(problem, order=choice.order)
    return found(problem, device=device) if search in _ALIKE else found(problem)


def plan_table(explanation: Explanation) -> str:
    """The plan as a table of its stages, in Markdown, with a summary."""
    rows = [
        (
            f"{row.stage}",
            f"{row.first}-{row.last}",
            row.devices,
            f"{1e3 * row.compute_s:.1f}",
            f"{1e3 * row.sync_s:.1f}",
            f"{1e3 * row.transfer_s:.1f}",
            "" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:,.0f}",
            f"{row.utilisation:.0%}",
        )
        for row in explanation.rows
    ]
    head = (
        "stage",
        "states" if explanation.nodes else "layers",
        "devices",
        "compute ms",
        "all-reduce ms",
        "transfer ms",
        "memory MiB",
        "busy",
    )
    rate = f"{1e3 * explanation.bottleneck_s:.1f} ms a minibatch, limited by {explanation.limit}"
    solution = explanation.solution
    if (expected_s := solution.expected_s) is not None:
        rate += f" on these devices; PipeDream's levels expect {1e3 * expected_s:.2f} ms"
    order = f", devices in the order {', '.join(solution.order)}" if solution.order else ""
    lines = [
        f"{solution.strategy}: {solution.config}{order}",
        markdown_table(head, rows),
        f"{rate}; {explanation.verdict()}",
    ]
    if explanation.nodes:
        lines.append("the graph branches: stages end at its states and hold these nodes")
    for number, names in enumerate(explanation.nodes or ()):
        nodes = ", ".join(name.partition(" -- ")[0] for name in names)
        lines.append(f"stage {number}: {nodes}")
    return "\n".join(lines)


def recomputing(
    plan: Plan, spec: RunSpec, inventory: Inventory, profiles: Mapping[str, Profile]
) -> Plan:
    """The given plan, with the layers that ``recompute`` sets in its details.

    Raises:
        ConfigError: the setting does not suit the plan, or a stage does not fit its devices.
    """
    if spec.parallel.recompute != "auto":
        return with_spans(plan, given_spans(plan, spec.parallel))
    memory = memory_model(SearchChoice(**spec.recompute_memory), spec)
    synchronous = synchronous_stages_of(spec.parallel, profiles)
    assert memory is not None
    assert synchronous is not None, "no other strategy has the option"
    room = {(h.name, d.name): d.memory_bytes for h in inventory.hosts for d in h.devices}
    known = {place.text: room[place.host, place.name] for place in places(inventory)}
    chosen = choose_spans(
        plan,
        profiles,
        {name: float(limit) for name, limit in known.items() if limit is not None},
        memory=replace(memory, stash=False, predicted=False),
        microbatches=synchronous.microbatches,
    )
    log_chosen(chosen)
    return with_spans(plan, chosen.spans)
