"""Seconds that the ranks of a plan compute, and bytes that they send, for each minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sparsepipe.cluster.places import device_name
from sparsepipe.errors import PlanError
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.activation_checkpointing.stage_memory import most_kept
from sparsepipe.partition.costs.layers import Spans, chain_spans, loads_s
from sparsepipe.partition.explanation import rank_times
from sparsepipe.profiling import Profile, check_there
from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import Stage

_COPYING = ("stash", "vertical_sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of one stage.

    Args:
        forward_s: seconds of a forward, by rank of the stage.
        backward_s: seconds of a backward, by rank of the stage.
        update_s: seconds of an update on the slowest rank.
        copy_s: seconds of a copy of all weights on the slowest rank, which an update makes first if
            they are still needed.
        output_bytes: size of the activation that the stage sends to the next one.
        gradient_bytes: size of the gradient that the next stage sends back.
        parameter_bytes: size of the stage's parameters, whose gradients its replicas sum.
        layers_backward_s: for each rank, seconds of each layer's backward, last layer first; needed
            for sums that begin before the backward ends.
        layers_parameter_bytes: size of each layer's parameters, last layer first.
        stored_bytes: bytes that a minibatch keeps from its forward to its backward.
        recomputed_bytes: additional bytes while the layers of a minibatch are recomputed, one
            minibatch at a time.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float = 0.0
    copy_s: float = 0.0
    output_bytes: float = 0.0
    gradient_bytes: float = 0.0
    parameter_bytes: float = 0.0
    layers_backward_s: tuple[tuple[float, ...], ...] = ()
    layers_parameter_bytes: tuple[float, ...] = ()
    stored_bytes: float = 0.0
    recomputed_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A plan and its costs.

    Args:
        plan: the stages and their ranks.
        stages: costs of each stage.
        vertical_sync: whether all stages keep older weights, so that a minibatch uses weights
            with the same updates in all of them; False: a stage keeps weights only until the
            backwards of the minibatches that ran the forward with them.
    """

    plan: Plan
    stages: tuple[StageCosts, ...]
    vertical_sync: bool = False

    def __post_init__(self) -> None:
        ranks = [len(stage.forward_s) for stage in self.stages]
        backward = [len(stage.backward_s) for stage in self.stages]
        replicas = [stage.replicas for stage in self.plan.stages]
        assert ranks == backward == replicas, "seconds are needed for each rank of each stage"

    @classmethod
    def uniform(
        cls,
        plan: Plan,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        scale: Sequence[float] | None = None,
        output_bytes: float = 0.0,
        parameter_bytes: float = 0.0,
    ) -> Workload:
        """A workload with these costs in all stages; stage k takes ``scale[k]`` times as long."""
        factors = [1.0] * plan.num_stages if scale is None else scale
        stages = tuple(
            StageCosts(
                forward_s=(forward_s * factor,) * stage.replicas,
                backward_s=(backward_s * factor,) * stage.replicas,
                output_bytes=output_bytes,
                gradient_bytes=output_bytes,
                parameter_bytes=parameter_bytes,
            )
            for stage, factor in zip(plan.stages, factors, strict=True)
        )
        return cls(plan=plan, stages=stages)

    @classmethod
    def of(cls, plan: Plan, profiles: Mapping[str, Profile], *, mode: str = "stash") -> Workload:
        """The workload of a plan for a chain of layers, from profiles by device model.

        Seconds are those of each rank's own device; bytes of layers are the largest of any device
        of the plan, as for searches. Updates, copies of weights (in the modes ``stash`` and
        ``vertical_sync``) and loading, which is part of the first stage's forwards, count if all
        profiles have them. The gradient across a cut counts as large as the activation, though a
        sparse activation's coordinates do not come back.
        """
        held = [[_profile(device, profiles) for device in stage.devices] for stage in plan.stages]
        different = {id(profile): profile for each in held for profile in each}.values()
        spans = chain_spans(list(different))  # a thousand devices share few profiles
        if plan.num_layers != spans.num_layers:
            raise PlanError(
                f"the plan covers {plan.num_layers} layers, but the profiles have "
                f"{spans.num_layers}",
                remedy="choose the model that the plan was made for, or search for a new plan",
            )
        updates = all(profile.update_s is not None for profile in different)
        copies = mode in _COPYING and all(profile.copy_s is not None for profile in different)
        load_s = dict(zip(map(id, different), loads_s(list(different)), strict=True))
        stages = zip(plan.stages, held, strict=True)
        return cls(
            plan=plan,
            stages=tuple(
                _costs(stage.layers, own, spans, load_s=load_s, updates=updates, copies=copies)
                for stage, own in stages
            ),
            vertical_sync=mode == "vertical_sync",
        )

    @classmethod
    def expected(cls, plan: Plan) -> Workload | None:
        """The workload with the times that the plan's search expected; None if the plan has none.

        A stage's grid of devices counts as its first rank; forwards of stage 0 include loading.
        """
        times = rank_times(plan)
        stages = []
        for number, stage in enumerate(plan.stages if times else ()):
            ranks = plan.ranks_of(number) if stage.grid is None else plan.ranks_of(number)[:1]
            own = [times[rank] for rank in ranks]
            stages.append(
                StageCosts(
                    forward_s=tuple(each["forward"] + each.get("load", 0.0) for each in own),
                    backward_s=tuple(each["backward"] for each in own),
                    update_s=max(each["update"] for each in own),
                    parameter_bytes=1.0,  # replicas with something to sum meet at their updates
                )
            )
        return cls(plan=plan.without_grids, stages=tuple(stages)) if stages else None

    def recomputing(self, spans: StageSpans, profiles: Mapping[str, Profile]) -> Workload:
        """The workload if each stage recomputes its ``spans`` of layers during backwards."""
        stages = [
            _recomputing(costs, stage, own, profiles) if own else costs
            for costs, stage, own in zip(self.stages, self.plan.stages, spans, strict=True)
        ]
        return replace(self, stages=tuple(stages))

    def split(self, microbatches: int, *, batches: int = 1) -> Workload:
        """The workload per microbatch, where a minibatch consists of ``batches`` batches of the
        present workload and is cut into ``microbatches`` equal parts.

        Times of forwards and backwards, sizes of messages, and stored and recomputed bytes are
        multiplied by ``batches / microbatches``; other costs stay as they are.
        """
        share = batches / microbatches
        stages = [
            replace(
                stage,
                forward_s=tuple(seconds * share for seconds in stage.forward_s),
                backward_s=tuple(seconds * share for seconds in stage.backward_s),
                output_bytes=stage.output_bytes * share,
                gradient_bytes=stage.gradient_bytes * share,
                stored_bytes=stage.stored_bytes * share,
                recomputed_bytes=stage.recomputed_bytes * share,
            )
            for stage in self.stages
        ]
        return replace(self, stages=tuple(stages))


def _profile(device: str, profiles: Mapping[str, Profile]) -> Profile:
    name = device_name(device)
    check_there([name], profiles)
    return profiles[name]


def _costs(
    layers: tuple[int, int],
    profiles: Sequence[Profile],
    spans: Spans,
    *,
    load_s: Mapping[int, float],
    updates: bool,
    copies: bool,
) -> StageCosts:
    """The costs of a stage with a profile for each device; ``load_s`` is by ``id`` of these."""
    first, end = layers[0], layers[1] + 1
    kinds = {id(profile): profile.layers[first:end] for profile in profiles}
    forward_s = {
        k: sum(layer.forward_s for layer in own) + (0.0 if first else load_s[k])
        for k, own in kinds.items()
    }
    backward_s = {k: sum(layer.backward_s for layer in own) for k, own in kinds.items()}
    apart_s = {k: tuple(layer.backward_s for layer in own[::-1]) for k, own in kinds.items()}
    update_s = max(sum(layer.update_s or 0.0 for layer in own) for own in kinds.values())
    copy_s = max(sum(layer.copy_s or 0.0 for layer in own) for own in kinds.values())
    ranks = [id(profile) for profile in profiles]
    cut_bytes = float(spans.cut_bytes_I[end])
    return StageCosts(
        forward_s=tuple(forward_s[kind] for kind in ranks),
        backward_s=tuple(backward_s[kind] for kind in ranks),
        update_s=update_s * updates,
        copy_s=copy_s * copies,
        output_bytes=cut_bytes,
        gradient_bytes=cut_bytes,
        parameter_bytes=spans.parameter_bytes(first, end),
        layers_backward_s=tuple(apart_s[kind] for kind in ranks),
        layers_parameter_bytes=tuple(
            spans.parameter_bytes(layer, layer + 1) for layer in range(end - 1, first - 1, -1)
        ),
        stored_bytes=spans.stored_bytes(first, end),
    )


def _recomputing(
    costs: StageCosts, stage: Stage, spans: Sequence[range], profiles: Mapping[str, Profile]
) -> StageCosts:
    first, last = stage.layers
    held = [_profile(device, profiles) for device in stage.devices]
    again = {layer for span in spans for layer in span}
    again_s = [
        [own.layers[n].forward_s * (n in again) for n in range(last, first - 1, -1)] for own in held
    ]
    different = {id(profile): profile for profile in held}.values()
    stored, inside = most_kept(tuple(different), spans, first=first, last=last)
    return replace(
        costs,
        backward_s=tuple(s + sum(more) for s, more in zip(costs.backward_s, again_s, strict=True)),
        layers_backward_s=tuple(
            tuple(s + more for s, more in zip(layers_s, every, strict=True))
            for layers_s, every in zip(costs.layers_backward_s, again_s, strict=True)
        ),
        stored_bytes=stored,
        recomputed_bytes=inside,
    )
