"""What jobs take of a machine by their configuration, and that a part of it makes no other run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from sparsepipe.cluster.places import gpu_indices
from sparsepipe.config import compose
from sparsepipe.config.build import build_inventory
from sparsepipe.config.sweep_environment import announce_hardware
from sparsepipe.sweep.resources import machine, needs, whole_machine
from sparsepipe.sweep.slots import Demand, Gpu, Machine, Settings, Slots
from sparsepipe.utils.extensions import imported
from sparsepipe.utils.host import quota_limits, usable_cores
from tests.support.command_line import composed
from tests.support.control_groups import quota_group
from tests.support.plans import plan_on
from tests.support.resolved import resolved

CPU = Machine(cores=(0, 1, 2, 3))
KINDS = ("RTX", "RTX", "RTX", "TITAN")
GPUS = Machine(
    cores=tuple(range(8)), gpus=tuple(Gpu(token=str(n), kind=kind) for n, kind in enumerate(KINDS))
)
SIMULATED = ("task=simulate", "hardware=paper_5gpu", "parallel=hete_mp")


@pytest.mark.parametrize(
    ("overrides", "cores_per_rank", "demand"),
    [
        (("hardware.accelerator=cpu",), None, Demand(ranks=1, cores=4)),
        (("hardware.accelerator=cpu",), 1, Demand(ranks=1, cores=1)),
        (("parallel=dp", "parallel.devices=2", "hardware=cores"), None, Demand(ranks=2, cores=4)),
        (("parallel=dp", "parallel.devices=2", "hardware=cores"), 1, Demand(ranks=2, cores=2)),
        (("parallel=dp", "parallel.devices=8", "hardware=cores"), 1, Demand(ranks=8, cores=4)),
        (SIMULATED, None, Demand(ranks=1, cores=1)),
        (("task=paper/table3", "hardware=paper_8gpu"), None, Demand(ranks=1, cores=1)),
    ],
)
def test_needs_of_jobs(
    overrides: tuple[str, ...], cores_per_rank: int | None, demand: Demand
) -> None:
    config = composed(*overrides)
    assert needs(config, CPU, Settings(cores_per_rank=cores_per_rank)) == demand


def test_the_document_names_the_tasks_of_one_core() -> None:
    text = (Path(__file__).parents[3] / "docs" / "sweeps.md").read_text()
    (row,) = re.findall(r"^\| `task=(.*)` \| one core \|$", text, re.MULTILINE)
    group = compose.config_dir() / "task"
    targets = {
        str(path.relative_to(group).with_suffix("")): yaml.safe_load(path.read_text())["_target_"]
        for path in group.rglob("*.yaml")
        if "_target_" in path.read_text()
    }
    found = {name for name, target in targets.items() if target and _cores(target) == 1}
    assert set(row.split("`, `")) == found


def _cores(target: str) -> int | None:
    return getattr(imported(target), "cores", None)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch finds four."""
    names = ("RTX", "RTX", "RTX", "TITAN")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name=names[index], total_memory=2**34),
    )


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ((), KINDS[:1]),
        (("parallel=dp", "parallel.devices=2"), KINDS[:2]),
        (("parallel=dp",), KINDS),
        # Which ones, the search or the task finds out, or an inventory says.
        (("parallel=hete_mp",), KINDS),
        (("task=profile", "task.device=TITAN"), KINDS),
        (("task=paper/table1", "task.device=TITAN"), KINDS),
        (("hardware=paper_8gpu",), KINDS),
        # None at all.
        (("hardware.accelerator=cpu",), ()),
        (SIMULATED, ()),
    ],
)
def test_gpus_of_jobs(overrides: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    found = needs(composed(*overrides), GPUS, Settings())
    assert found.gpus == kinds
    if kinds:
        assert found.cores == 2 * len(kinds), "their share"


FIRST, SECOND, THIRD, OTHER = (f"here/{name}" for name in ("RTX/0", "RTX/1", "RTX/2", "TITAN/0"))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ((FIRST, SECOND), ("RTX", "RTX")),
        ((SECOND, FIRST), ("RTX", "RTX")),
        ((FIRST, OTHER), ("RTX", "TITAN")),
        ((OTHER, FIRST), ("TITAN", "RTX")),
        # A job that sees two of a kind has no third one.
        ((FIRST, THIRD), KINDS),
        ((SECOND, THIRD), KINDS),
        ((SECOND, OTHER), KINDS),
        # Of a plan by hand.
        (("rank 0", "rank 1"), ("RTX", "RTX")),
    ],
)
def test_a_plan_finds_its_devices_among_the_gpus_of_its_job(
    devices: tuple[str, str], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where it runs beside another job, which has the first GPU."""
    path = tmp_path / "plan.json"
    path.write_text(plan_on(devices[:1], devices[1:], cuts=[2], num_layers=4).to_json())
    config = composed("parallel=pipeline", f"parallel.plan.file={path}")
    wanted = needs(config, GPUS, Settings())
    assert wanted.gpus == kinds
    inventory = build_inventory(config)
    places = resolved(config, inventory).places
    slots = Slots(machine=GPUS)
    other = slots.grant(Demand(ranks=1, cores=1, gpus=KINDS[:1]))
    assert other is not None
    beside = replace(slots, taken=(other,)).grant(wanted)
    assert (beside is None) == (kinds == KINDS)
    granted = beside or slots.grant(wanted)
    assert granted is not None
    seen = [gpu.kind for gpu in GPUS.gpus if gpu.token in granted.gpus]
    found = gpu_indices(places, seen, host=inventory.hosts[0])
    assert [seen[index] for index in found] == [place.name for place in places]
    assert len(set(found)) == 2


@pytest.fixture
def one_core() -> Iterator[None]:
    """This process on one core, as a job that has a part of the machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing yet, and what is told is forgotten."""
    monkeypatch.setenv("SPARSEPIPE_HARDWARE", "")


@pytest.mark.usefixtures("nothing_told")
@pytest.mark.parametrize("emulated", [(), ("hardware.emulate=true", "hardware.time_scale=2")])
def test_a_part_of_the_machine_makes_no_other_run(
    emulated: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    config = composed("hardware.accelerator=cpu", *emulated)
    whole, told = build_inventory(config), whole_machine(config)
    request.getfixturevalue("one_core")
    assert machine().cores == (min(os.sched_getaffinity(0)),)
    if whole.num_devices > 1:
        assert build_inventory(config).fingerprint() != whole.fingerprint()
    announce_hardware(yaml.safe_load(yaml.safe_dump(told)))  # as a job gets it, in a file
    assert build_inventory(config).fingerprint() == whole.fingerprint()
    other = composed("hardware.accelerator=cpu", "hardware.cpu_devices=7", *emulated)
    assert build_inventory(other).num_devices == 7, "of which nothing was told"


@pytest.mark.full
@pytest.mark.skipif(usable_cores() < 2, reason="one core is no less with a quota")
def test_cores_of_a_quota_only_count() -> None:
    """Others of this host have a quota, too, and would be bound to the same ones."""
    asked = "from sparsepipe.sweep.resources import machine as m; print(m().binds)"
    command = [sys.executable, "-c", asked]
    with quota_group(0.5) as within:
        found = subprocess.run([*within, *command], check=True, capture_output=True, text=True)
    assert found.stdout == "False\n"
    assert machine().binds or quota_limits()


@pytest.mark.usefixtures("nothing_told")
def test_what_is_written_down_needs_no_word() -> None:
    listed = composed("hardware=cores")
    assert whole_machine(listed) is None
    inventory = build_inventory(listed)
    announce_hardware(None)
    assert build_inventory(listed) == inventory
