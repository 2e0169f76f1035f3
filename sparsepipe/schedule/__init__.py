"""Pure: how a model is split, and what each rank does when."""

from sparsepipe.schedule.actions import Action, Schedule
from sparsepipe.schedule.asynchronous import RankOrder, asynchronous
from sparsepipe.schedule.balance import balanced
from sparsepipe.schedule.plan import Plan, Stage
from sparsepipe.schedule.synchronous import gpipe, naive, one_f_one_b
from sparsepipe.schedule.timeline import Span, lanes, timeline, unit_times
from sparsepipe.schedule.validity import check
from sparsepipe.schedule.versions import (
    Passage,
    Tally,
    included_at,
    passages,
    peak_predicted,
    peak_stashed,
    peak_vertical,
    until_return,
)

__all__ = [
    "Action",
    "Passage",
    "Plan",
    "RankOrder",
    "Schedule",
    "Span",
    "Stage",
    "Tally",
    "asynchronous",
    "balanced",
    "check",
    "gpipe",
    "included_at",
    "lanes",
    "naive",
    "one_f_one_b",
    "passages",
    "peak_predicted",
    "peak_stashed",
    "peak_vertical",
    "timeline",
    "unit_times",
    "until_return",
]
