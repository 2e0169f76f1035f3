"""Plans, which split a model into stages, and schedules, which list what each rank does."""

from sparsepipe.schedule.actions import Action, MinibatchSupply, Schedule
from sparsepipe.schedule.asynchronous import RankOrder, asynchronous, asynchronous_order
from sparsepipe.schedule.plan import Plan, Stage, balanced
from sparsepipe.schedule.spans import Span
from sparsepipe.schedule.synchronous import (
    SYNCHRONOUS,
    WARMUPS,
    eager_one_f_one_b,
    eager_order,
    gpipe,
    gpipe_order,
    naive,
    naive_order,
    one_f_one_b,
    one_f_one_b_order,
    order_by_name,
    synchronous_by_name,
)
from sparsepipe.schedule.validity import check
from sparsepipe.schedule.versions import (
    Passage,
    Tally,
    included_at,
    passages,
    peaks,
    until_return,
)

__all__ = [
    "SYNCHRONOUS",
    "WARMUPS",
    "Action",
    "MinibatchSupply",
    "Passage",
    "Plan",
    "RankOrder",
    "Schedule",
    "Span",
    "Stage",
    "Tally",
    "asynchronous",
    "asynchronous_order",
    "balanced",
    "check",
    "eager_one_f_one_b",
    "eager_order",
    "gpipe",
    "gpipe_order",
    "included_at",
    "naive",
    "naive_order",
    "one_f_one_b",
    "one_f_one_b_order",
    "order_by_name",
    "passages",
    "peaks",
    "synchronous_by_name",
    "until_return",
]
