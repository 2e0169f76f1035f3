"""Plans for tests in which only the placement matters, and sends between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import Stage


def plan_of(config: str) -> Plan:
    """Stages of one layer with as many replicas as ``config`` says, such as "2-1"."""
    stages = config.count("-") + 1
    return Plan.of(config=config, cuts=range(1, stages), num_layers=stages)


def plan_on(
    *stages: Sequence[str],
    cuts: Sequence[int] = (),
    num_layers: int | None = None,
    **details: object,
) -> Plan:
    """Stages on the devices of those names; of one layer each unless ``cuts`` say otherwise."""
    bounds = [0, *(cuts or range(1, len(stages))), num_layers or len(stages)]
    return Plan(
        stages=tuple(
            Stage(layers=(bounds[s], bounds[s + 1] - 1), devices=tuple(devices))
            for s, devices in enumerate(stages)
        ),
        details=details,
    )


__all__ = ["configs", "plan_of"]


def configs(max_ranks: int) -> Iterator[str]:
    """Every way to share up to ``max_ranks`` ranks between stages."""

    def shares(ranks: int) -> Iterator[tuple[int, ...]]:
        if ranks == 0:
            yield ()
        for first in range(1, ranks + 1):
            for rest in shares(ranks - first):
                yield (first, *rest)

    for ranks in range(1, max_ranks + 1):
        yield from ("-".join(map(str, share)) for share in shares(ranks))
