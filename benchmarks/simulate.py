"""How long does a simulation take, and how does that grow with the number of devices?

Synthetic layers on four types of devices, 10,000 minibatches, on 8 to 1,024 devices: data
parallelism; a stage for each type, as HETE-MP would have it; stages whose numbers of replicas have
no common measure, so that a run hardly repeats itself; stages of eight; and a stage for each
device. *Simulated* are the minibatches of the run until it repeats itself and drains; what is left
follows from these. Where a run is too short to do so, those of a longer one, which tells the pace
of a full pipeline, count as well. Data parallelism sums in a ring, in buckets while the backward
runs; replicas of a stage sum after it in the order of their ranks, as ``task=simulate`` has it by
default. With --whole every run is simulated to its end beside that, and must end at the same time.

    python benchmarks/simulate.py [--devices 8 64 ...] [--minibatches 10000] [--whole] [--task]

A synthetic layer takes log-normal times (median 1 ms, sigma 1) on the first type, 1.4, 1.8 and 2.2
times as long on the others, each 10 % more or less; parameters of 1 MB and activations of 0.25 MB
are log-normal as well. Of the devices 4, 2, 1 and 1 eighths are of each type, in hosts of up to
eight; 12 GB/s between devices of a host, 1.25 GB/s between hosts. Each device has its share of the
time on the first type, roughly: there are 200 layers, or as many as devices.

--task times the whole command ``sparsepipe task=simulate`` as well, each in a process of its own:
the plan, data parallelism with and without overlap, memory, table, picture and trace.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.cluster.places import places
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.schedule import Plan, Stage
from sparsepipe.simulate.engine import Engine, Setting
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Pace, Simulation
from sparsepipe.simulate.workload import Workload
from sparsepipe.utils.host import usable_cores

MODEL = "sparse_vgg16_bn"
"""Under whose name the task finds the profiles; any model would do."""
EIGHTHS = (4, 2, 1, 1)
"""Of the devices, by type."""
GOAL_S = 60.0
"""For 10,000 minibatches on 1,024 devices."""
BUCKET_BYTES = 25 * 2.0**20
SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan on a cluster.

    Attributes:
        name: of the plan.
        plan: the same.
        inventory: the cluster.
        profiles: of each type.
    """

    name: str
    plan: Plan
    inventory: Inventory
    profiles: dict[str, Profile]

    def simulation(self) -> Simulation:
        """Of the plan; see the head of the file."""
        is_dp = self.plan.num_stages == 1
        setting = Setting(
            network=ClusterNetwork.of(self.inventory, self.plan),
            algorithm="ring" if is_dp else "ordered",
            bucket_bytes=BUCKET_BYTES if is_dp else None,
        )
        return Simulation.of(Workload.of(self.plan, self.profiles), setting)


def cluster(devices: int, folder: Path = Path()) -> Inventory:
    """Four types of devices, whose profiles lie in a folder; see the head of the file."""
    hosts: list[Host] = []
    for kind, eighths in enumerate(EIGHTHS):
        left = devices * eighths // 8
        while left:
            count = min(8, left)
            left -= count
            profile = {MODEL: str(folder / f"type{kind}.json")}
            device = Device(name=f"type{kind}", count=count, profile=profile)
            link = Link(bytes_per_s=12e9, latency_s=5e-6)
            hosts.append(Host(name=f"host{len(hosts)}", devices=(device,), link=link))
    return Inventory(hosts=tuple(hosts), link=Link(bytes_per_s=1.25e9, latency_s=5e-5))


def synthetic_profiles(layers: int, *, seed: int = 0) -> dict[str, Profile]:
    """Of each type; see the head of the file."""
    draw = np.random.default_rng(seed)
    base_s = draw.lognormal(0, 1, layers) * 1e-3
    slower = 1 + 0.4 * np.arange(len(EIGHTHS))[:, None]
    compute_s = base_s * slower * draw.uniform(0.9, 1.1, (len(EIGHTHS), layers))
    parameters, activations = draw.lognormal(0, 1, (2, layers)) * [[1e6], [0.25e6]]
    return {
        f"type{kind}": Profile(
            layers=tuple(
                LayerProfile(
                    index=index,
                    name=str(index),
                    kind="Synthetic",
                    forward_s=each_s / 3,
                    backward_s=each_s * 2 / 3,
                    activation_bytes=float(activations[index]),
                    parameter_bytes=float(parameters[index]),
                    update_s=float(parameters[index]) / 50e9,
                )
                for index, each_s in enumerate(map(float, own_s))
            ),
            meta={"batch_size": 64, "source": "benchmarks/simulate.py", "kind": "synthetic"},
        )
        for kind, own_s in enumerate(compute_s)
    }


def replicas_of(devices: int) -> dict[str, list[int]]:
    """Devices of each stage, by the names of the plans."""
    types = [devices * eighths // 8 for eighths in EIGHTHS]
    # No two of them have a common measure, as near to the types' as may be.
    odd = [_prime(types[0] - devices // 16), _prime(types[1] - devices // 64), _prime(types[2])]
    return {
        "dp": [devices],
        "a stage for each type": types,
        "unlike stages": [*odd, devices - sum(odd)],
        "stages of 8": [8] * (devices // 8),
        "a stage for each device": [1] * devices,
    }


def _prime(most: int) -> int:
    """The largest one that is no more; 1 where there is none."""
    found = (n for n in range(most, 1, -1) if all(n % k for k in range(2, math.isqrt(n) + 1)))
    return next(found, 1)


def cases(devices: int) -> Iterator[Case]:
    """All plans on so many devices."""
    inventory = cluster(devices)
    profiles = synthetic_profiles(max(200, devices))
    names = [place.text for place in places(inventory)]
    seconds = [layer.compute_s for layer in profiles["type0"].layers]
    for name, replicas in replicas_of(devices).items():
        left = iter(names)
        stages = tuple(
            Stage(layers=(first, end - 1), devices=tuple(next(left) for _ in range(count)))
            for (first, end), count in zip(
                pairwise(bounds(seconds, replicas)), replicas, strict=True
            )
        )
        yield Case(name=name, plan=Plan(stages=stages), inventory=inventory, profiles=profiles)


def bounds(seconds: Sequence[float], replicas: Sequence[int]) -> list[int]:
    """Places that cut layers into stages: each device has its share of the time, roughly."""
    time_s, devices = np.cumsum(seconds), np.cumsum(replicas)
    found = [0]
    for stage, share in enumerate(devices[:-1] / devices[-1], start=1):
        place = int(np.searchsorted(time_s, share * time_s[-1])) + 1
        most = len(seconds) - (len(replicas) - stage)  # a layer for each stage that follows
        found.append(min(max(place, found[-1] + 1), most))
    return [*found, len(seconds)]


def timed(case: Case, minibatches: int) -> tuple[Pace, float, float]:
    """The pace of a long run, and seconds that it took to find it: of the clock, of the core."""
    begin_s, core_s = time.perf_counter(), time.process_time()
    found = case.simulation().pace(minibatches)
    return found, time.perf_counter() - begin_s, time.process_time() - core_s


def whole_s(case: Case, minibatches: int) -> float:
    """When a run ends that is simulated to its end."""
    simulation = case.simulation()
    actions = [simulation.order(rank, minibatches) for rank in range(case.plan.num_ranks)]
    engine = Engine(simulation.workload, actions, simulation.setting, keep=False, detector=None)
    return engine.run().end_s


def task_seconds(case: Case, minibatches: int) -> float:
    """Of the whole command, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, profile in case.profiles.items():
            profile.save(root / f"{name}.json")
        hardware = cluster(case.plan.num_ranks, root)
        (root / "hardware.yaml").write_text(hardware.to_yaml())
        (root / "plan.json").write_text(case.plan.to_json())
        chosen = ["parallel=dp"]
        if case.plan.num_stages > 1:
            chosen = ["parallel=pipeline", f"parallel.plan.file={root / 'plan.json'}"]
        command = [
            *(sys.executable, "-m", "sparsepipe", "task=simulate", f"model={MODEL}"),
            *("hardware=file", f"hardware.source={root / 'hardware.yaml'}", *chosen),
            *(f"task.minibatches={minibatches}", f"paths.outputs={root / 'outputs'}"),
        ]
        begin_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        took_s = time.perf_counter() - begin_s
        if done.returncode:
            raise SystemExit(done.stderr)
        return took_s


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--minibatches", type=int, default=10_000)
    parser.add_argument("--whole", action="store_true", help="simulate to the end as well")
    parser.add_argument("--task", action="store_true", help="time the whole command as well")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if any(devices % 8 or devices < 8 for devices in options.devices):
        raise SystemExit("devices come in eighths of four types: give multiples of 8")
    print(
        f"{usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}; load "
        f"{os.getloadavg()[0]:.1f}; {options.minibatches:,} minibatches"
    )
    print(
        f"{'':47}  seconds  seconds\n"
        "devices  plan                     stages  simulated  to wait  of core  minibatches/s"
        + ("  whole command" if options.task else "")
    )
    late = []
    for devices in options.devices:
        for case in cases(devices):
            found, took_s, core_s = timed(case, options.minibatches)
            task_s = task_seconds(case, options.minibatches) if options.task else None
            late += [case.name] * (max(took_s, task_s or 0.0) > GOAL_S)
            print(
                f"{devices:7,}  {case.name:23}  {case.plan.num_stages:6,}  {found.simulated:9,}  "
                f"{took_s:7.2f}  {core_s:7.2f}  {1 / found.minibatch_s:13.4g}"
                f"{'' if task_s is None else f'  {task_s:13.1f}'}",
                flush=True,
            )
            if options.whole:
                end_s = whole_s(case, options.minibatches)
                apart = abs(end_s - found.total_s) / end_s
                print(f"         simulated to its end: {apart:.1e} apart", flush=True)
                assert apart <= SAME, "the end was foretold wrongly"
    print(f"goal, each within {GOAL_S:.0f} s: {'MISSED: ' + ', '.join(late) if late else 'met'}")


if __name__ == "__main__":
    main()
