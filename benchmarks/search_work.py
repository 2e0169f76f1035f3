"""How long does a search take that looks at as much as it may, where the memory chooses layers?

Such a search (``parallel.strategy.recompute=auto``) counts what it looks at in place of its time.
Here are searches over few and many layers and devices, with the processor's seconds: of all, and
microseconds of a look. *Ended* are those that looked at as much as they may.

    python benchmarks/search_work.py [--most 8000000] [--case 0 1 ...]

A layer takes log-normal times (median 1 ms, sigma 1) on the first type of devices and 1.4 times as
long on the second. It saves what is log-normal as well (sigma 0.5, median 64 MB for the first
layers, half of that after each fifth of them). A device holds a share of what all layers save for
a batch.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass

import numpy as np

from sparsepipe.errors import PlanError
from sparsepipe.partition.activation_checkpointing.work import MOST_LOOKS, Work
from sparsepipe.partition.costs.layers import chain_spans
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.devices import Fleet, Kind
from sparsepipe.partition.memory.microbatches import Microbatches
from sparsepipe.partition.memory.model import MemoryModel
from sparsepipe.partition.problem import Problem, SynchronousStages
from sparsepipe.partition.search.algorithms import dp, exact, hete_mp, straight
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.utils.host import usable_cores

SEARCHES = {"dp": dp, "exact": exact, "hete_mp": hete_mp, "straight": straight}
SLOWER = (1.0, 1.4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A search, and what it looks at.

    Attributes:
        search: its name.
        layers: of the model.
        devices: of each type.
        share: of what all layers save that a device holds.
    """

    search: str
    layers: int
    devices: tuple[int, ...]
    share: float


CASES = (
    Case(search="exact", layers=52, devices=(4, 4), share=0.2),
    Case(search="exact", layers=150, devices=(4, 4), share=0.2),
    Case(search="hete_mp", layers=200, devices=(8, 8), share=0.1),
    Case(search="straight", layers=300, devices=(2, 2), share=0.2),
    Case(search="dp", layers=1000, devices=(1,), share=0.5),
)


def problem_of(case: Case, *, seed: int = 0) -> Problem:
    """See the head of the file."""
    draw = np.random.default_rng(seed)
    forward_s = draw.lognormal(0, 1, case.layers) * 1e-3
    levels = 5 * np.arange(case.layers) // case.layers
    saved = 64e6 * draw.lognormal(0, 0.5, case.layers) / 2**levels
    profiles = [
        Profile(
            layers=tuple(
                LayerProfile(
                    index=index,
                    name=str(index),
                    kind="layer",
                    forward_s=slower * forward_s[index],
                    backward_s=2 * slower * forward_s[index],
                    activation_bytes=saved[index],
                    parameter_bytes=1e5,
                    saved_bytes=saved[index],
                    begin_bytes=saved[index],
                    end_bytes=saved[index] * (index % 3 != 2),
                )
                for index in range(case.layers)
            ),
            meta={},
        )
        for slower in SLOWER[: len(case.devices)]
    ]
    kinds = tuple(
        Kind(name=f"type {k}", host="here", count=count, memory_bytes=case.share * saved.sum())
        for k, count in enumerate(case.devices)
    )
    cut = Microbatches(schedule="gpipe", count=8, batch_size=None)
    return Problem(
        fleet=Fleet(kinds=kinds, inside={"here": 1e9}, between=1e9),
        spans=chain_spans(profiles),
        model=cost_model("eq4"),
        memory=MemoryModel(stash=False),
        profiles=tuple(profiles),
        synchronous=SynchronousStages(setting="auto", microbatches=cut),
    )


def row(case: Case, most: float) -> str:
    """A search that may look at so much, timed."""
    problem = problem_of(case)
    work, begin_s = Work(most), time.process_time()
    try:
        plan = SEARCHES[case.search](problem, work=work).config
    except PlanError:
        plan = "none"
    seconds = time.process_time() - begin_s
    devices, ended = "+".join(map(str, case.devices)), "yes" if work.is_all_done else "no"
    return (
        f"{case.search:8}  {case.layers:6,}  {devices:>7}  {plan:>17}  {work.done:10,.0f}  "
        f"{ended:5}  {seconds:7.1f}  {1e6 * seconds / work.done:13.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=float, default=MOST_LOOKS, help="looks of a search")
    parser.add_argument("--case", type=int, nargs="+", default=range(len(CASES)), help="by number")
    options = parser.parse_args()
    print(
        f"{usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}, numpy "
        f"{np.__version__}; load {os.getloadavg()[0]:.1f}"
    )
    print("search    layers  devices               plan       looks  ended  seconds  us for a look")
    for number in options.case:
        print(row(CASES[number], options.most), flush=True)


if __name__ == "__main__":
    main()
