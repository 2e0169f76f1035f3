"""How fast ranks talk to each other: messages of the pipeline's transport, and all-reduces."""

from sparsepipe.runtime.bandwidth.bench import Bench, Effort
from sparsepipe.runtime.bandwidth.pairs import Sending, pairs_of, time_pairs
from sparsepipe.runtime.bandwidth.reductions import Reduction, groups_of, time_reductions

__all__ = [
    "Bench",
    "Effort",
    "Reduction",
    "Sending",
    "groups_of",
    "pairs_of",
    "time_pairs",
    "time_reductions",
]
