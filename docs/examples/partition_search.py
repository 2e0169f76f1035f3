"""A partition search: one stage on each device, with as many layers on each as on any other.

Used by ``parallel.search.search=partition_search.even_layers``, or ``task.search`` of
``task=partition``.
"""

from sparsepipe.partition.devices import Choice
from sparsepipe.partition.problem import Problem


def even_layers(problem: Problem) -> list[Choice]:
    """Stages take the devices in the order of the inventory."""
    fleet, layers = problem.fleet, problem.spans.num_layers
    kinds = [kind for kind, count in enumerate(fleet.counts) for _ in range(count)]
    ends = [layers * (number + 1) // len(kinds) for number in range(len(kinds))]
    stages, first = [], 0
    for kind, end in zip(kinds, ends, strict=True):
        counts = tuple(int(kind == other) for other in range(len(fleet.counts)))
        stages.append(Choice(first=first, end=end, counts=counts))
        first = end
    return stages
