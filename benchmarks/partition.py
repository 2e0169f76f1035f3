"""How long do the searches for a plan take, and how does that grow?

First the paper's own size: the 52 layers of sparse VGG16-BN on its 8 GPUs, from its authors'
measurements at 60 MB/s; each search several times, of which the median counts. Then chains of
synthetic layers on four types of devices, once each, and a picture of both searches over the
number of devices. Times are of the search alone, the problem being at hand.

    python benchmarks/partition.py [--devices 8 16 ...] [--layers 50 100 ...] [--picture FILE]

A synthetic layer takes log-normal times (median 1 ms, sigma 1) on the first type, 1.4, 1.8 and 2.2
times as long on the others, each 10 % more or less; parameters of 1 MB and activations of 4 MB
are log-normal as well. Each type has its quarter of the devices and a host of its own, at 1 GB/s
between any two. With limits a device holds 0.6 of what it would keep as the only one.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparsepipe.errors import PlanError
from sparsepipe.paper.plans import paper_inventory
from sparsepipe.partition.costs.layers import Spans
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.devices import DeviceKind, DevicePool
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.problem import Problem, Solution
from sparsepipe.partition.search.algorithms import check_subsets, exact, hete_mp
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.plots import style
from sparsepipe.utils.host import usable_cores

TYPES = 4
GOALS_S = {"hete_mp": 0.05, "exact": 0.5}
"""For the paper's size; 1,000 layers on 256 devices may take ``hete_mp`` a minute."""
LARGE_GOAL_S = 60.0
SEARCHES: dict[str, Callable[[Problem], Solution]] = {"hete_mp": hete_mp, "exact": exact}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A search on synthetic layers; ``seconds`` is None where it is refused."""

    search: str
    limits: bool
    layers: int
    devices: int
    seconds: float | None
    stages: int = 0


def paper_problem(*, limits: bool) -> Problem:
    """The paper's 8 GPUs."""
    inventory = paper_inventory(8)
    return Problem.of(
        inventory,
        load_profiles(inventory, "sparse_vgg16_bn", given={}),
        model=cost_model("sparsepipe_hete"),
        memory=MemoryModel() if limits else None,
        bandwidth_bytes_per_s=60e6,
    )


def synthetic_problem(layers: int, devices: int, *, limits: bool, seed: int = 0) -> Problem:
    """See the head of the file."""
    draw = np.random.default_rng(seed)
    base_s = draw.lognormal(0, 1, layers) * 1e-3
    slower = 1 + 0.4 * np.arange(TYPES)[:, None]
    compute_s = base_s * slower * draw.uniform(0.9, 1.1, (TYPES, layers))
    parameters, activations = draw.lognormal(0, 1, (2, layers)) * [[1e6], [4e6]]
    spans = Spans(
        compute_s_KI=np.pad(np.cumsum(compute_s, axis=1), ((0, 0), (1, 0))),
        parameter_bytes_I=np.array([0, *np.cumsum(parameters)]),
        stored_bytes_I=np.array([0, *np.cumsum(activations)]),
        cut_bytes_I=np.array([0, *activations[:-1], 0]),
    )
    memory = MemoryModel()
    alone = memory.stage_bytes(parameters.sum(), activations.sum(), replicas=1, left=1)
    kinds = tuple(
        DeviceKind(
            name=f"type {k}", host=f"host{k}", count=devices // TYPES, memory_bytes=0.6 * alone
        )
        for k in range(TYPES)
    )
    hosts = {kind.host: 1e9 for kind in kinds}
    pool = DevicePool(kinds=kinds, inside=hosts, between=1e9)
    model = cost_model("sparsepipe_hete")
    return Problem(pool=pool, spans=spans, model=model, memory=memory if limits else None)


def seconds_of(search: str, problem: Problem) -> tuple[float, Solution]:
    """Of one search."""
    begin_s = time.perf_counter()
    solution = SEARCHES[search](problem)
    return time.perf_counter() - begin_s, solution


def paper(repeats: int) -> None:
    """Prints medians for the paper's size beside their goals."""
    print(f"\n52 layers on the paper's 8 GPUs, median of {repeats}")
    print("search   limits  plan       ms  goal ms")
    for search, goal_s in GOALS_S.items():
        for limits in (False, True):
            problem = paper_problem(limits=limits)
            seconds_of(search, problem)
            runs = [seconds_of(search, problem) for _ in range(repeats)]
            median_s = statistics.median(seconds for seconds, _ in runs)
            verdict = "met" if median_s <= goal_s else "MISSED"
            print(
                f"{search:8} {_on(limits):6}  {runs[0][1].config:7} {1e3 * median_s:5.0f}  "
                f"{1e3 * goal_s:7.0f}  {verdict}"
            )


def growth(layers: list[int], devices: list[int]) -> Iterator[Timed]:
    """Each search on each size, with and without limits."""
    for search in SEARCHES:
        for limits in (False, True):
            for length in layers:
                for number in devices:
                    problem = synthetic_problem(length, number, limits=limits)
                    case = Timed(
                        search=search, limits=limits, layers=length, devices=number, seconds=None
                    )
                    if search == "hete_mp" or is_small(problem):
                        seconds, solution = seconds_of(search, problem)
                        case = replace(case, seconds=seconds, stages=len(solution.stages))
                    yield case


def is_small(problem: Problem) -> bool:
    """Whether ``exact`` takes it on."""
    try:
        check_subsets(problem)
    except PlanError:
        return False
    return True


def draw(rows: list[Timed], path: Path) -> None:
    """Time over devices, a line for each number of layers."""
    colours = [style.BLUE, style.GREEN, style.ORANGE, style.VERMILION, style.PURPLE]
    figure = style.new_figure(width_in=9, height_in=4)
    for axes, search in zip(figure.subplots(1, 2, sharey=True), SEARCHES, strict=True):
        for number, length in enumerate(dict.fromkeys(row.layers for row in rows)):
            for limits in (False, True):
                chosen = [
                    (row.devices, row.seconds)
                    for row in rows
                    if (row.search, row.layers, row.limits) == (search, length, limits)
                    and row.seconds is not None
                ]
                if chosen:
                    axes.loglog(
                        *zip(*chosen, strict=True),
                        color=colours[number % len(colours)],
                        linestyle="--" if limits else "-",
                        marker="o",
                        markersize=3,
                        label=None if limits else f"{length:,} layers",
                    )
        axes.set_title(f"{search}, {TYPES} types of devices", fontsize=style.TITLE_PT)
        axes.set_xlabel("devices (dashed: with limits of memory)", fontsize=style.LABEL_PT)
        axes.set_ylabel("seconds" if search == "hete_mp" else "", fontsize=style.LABEL_PT)
        devices = sorted({row.devices for row in rows})
        axes.set_xticks(devices, [str(number) for number in devices])
        axes.set_xlim(devices[0] / 1.1, devices[-1] * 1.1)
        axes.minorticks_off()
        axes.legend(fontsize=style.TICK_PT, frameon=False)
        style.tidy(axes)
    style.save_png(figure, path)
    print(f"\n{path}")


def _on(limits: bool) -> str:
    return "on" if limits else "off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[50, 100, 200, 500, 1000])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=9, help="of the paper's size (9)")
    parser.add_argument("--picture", type=Path, default=Path("outputs/partition_growth.png"))
    options = parser.parse_args()
    print(
        f"{usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}, numpy "
        f"{np.__version__}; load {os.getloadavg()[0]:.1f}"
    )
    paper(options.repeats)
    print(f"\nsynthetic layers on {TYPES} types of devices, once each")
    print("search   limits  layers  devices  stages  seconds")
    rows = []
    for row in growth(options.layers, options.devices):
        rows.append(row)
        took = "refused: too many subsets" if row.seconds is None else f"{row.seconds:7.2f}"
        print(
            f"{row.search:8} {_on(row.limits):6}  {row.layers:6,}  {row.devices:7}  "
            f"{row.stages or '':>6}  {took}",
            flush=True,
        )
    for row in rows:
        if (row.search, row.layers, row.devices) == ("hete_mp", 1000, 256):
            assert row.seconds is not None
            verdict = "met" if row.seconds <= LARGE_GOAL_S else "MISSED"
            print(
                f"goal, 1,000 layers on 256 devices in {LARGE_GOAL_S:.0f} s, limits "
                f"{_on(row.limits)}: {verdict}, {row.seconds:.1f} s"
            )
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
