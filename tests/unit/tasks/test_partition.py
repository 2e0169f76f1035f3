"""The tasks partition and table3, from the configuration to their files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError, HardwareError, PlanError, ProfileError
from sparsepipe.launch.prepare import resolve_run
from sparsepipe.paper.plans import PAPER as PRINTED
from sparsepipe.paper.plans import PaperRow, hete_mp_s, paper_inventory
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.algorithms import best_cuts
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.schedule import Plan
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed
from tests.support.picture_checks import shares_picture
from tests.support.planned_cases import MODEL
from tests.support.recompute_cases import saved
from tests.support.simulated_cases import run

PAPER = ("task=partition", "hardware=paper_8gpu", "task.bandwidth_bytes_per_s=60e6")
PROFILES = ", ".join(f"{name}: profiles/paper/{name.lower().replace(' ', '_')}.json"
                     for name in ("TITAN V", "TITAN Xp", "RTX 2080 Ti"))  # fmt: skip


def test_the_papers_eight_gpus(tmp_path: Path) -> None:
    done = run(tmp_path, *PAPER)
    plan = Plan.from_json(done.plan.read_text())
    assert (plan.config, plan.cuts) == ("7-1", (24,))
    assert plan.stages[1].devices == ("server1/TITAN V/0",)
    assert plan.details["order"] == ["RTX 2080 Ti", "TITAN Xp", "TITAN V"]
    assert plan.details["bandwidth_bytes_per_s"] == 60e6
    assert plan.details["memory"]["stash"] is True
    assert plan.details["inventory"]["devices"]["server1/TITAN Xp"] == 3
    sources = [profile["source"] for profile in plan.details["profiles"].values()]
    assert len(sources) == 3
    assert all("measured by the authors" in source for source in sources)
    result = json.loads(done.result.read_text())
    assert result["kind"] == "simulated"
    assert result["plan_config"] == "7-1"
    assert result["bottleneck_s"] == plan.details["bottleneck_s"]
    assert result["dp_s"] > result["bottleneck_s"]
    told = (done.path / "plan.txt").read_text()
    assert "0-23" in told
    assert "as fast as data parallelism" in told
    rows = list(csv.DictReader((done.path / "plan.csv").open()))
    assert [row["devices"] for row in rows] == ["3 x TITAN Xp + 4 x RTX 2080 Ti", "1 x TITAN V"]


def test_the_plan_is_drawn_over_every_device(tmp_path: Path) -> None:
    """The paper's Fig. 7 of all three kinds, with the cut: the picture of the shipped files."""
    done = run(tmp_path, *PAPER)
    place = Path("sparsepipe/assets/profiles/paper")
    names = ("TITAN V", "TITAN Xp", "RTX 2080 Ti")
    files = {name: place / f"{name.lower().replace(' ', '_')}.json" for name in names}
    assert (done.path / "shares.png").read_bytes() == shares_picture(files, tmp_path, cuts=[24])


def test_mp_takes_the_fastest_device_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="sparsepipe"):
        found = run(tmp_path, *PAPER, "task.search=mp")
    named = run(tmp_path, *PAPER, "task.search=mp", "task.device=RTX 2080 Ti")
    assert "mp treats all devices as equal to the fastest" in caplog.text
    assert "by its profile: RTX 2080 Ti" in caplog.text
    plans = [Plan.from_json(done.plan.read_text()) for done in (found, named)]
    assert plans[0] == plans[1]
    assert plans[0].details["device"] == "RTX 2080 Ti"


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("hardware=local", "hardware.accelerator=cpu"), ProfileError, "no profile of"),
        ((*PAPER, "model=sparse_vgg11_bn", f"++task.profiles={{{PROFILES}}}"), ProfileError,
         "another model: sparse_vgg16_bn, not sparse_vgg11_bn"),
        ((*PAPER, "++task.profiles={TITAN: profiles/paper/titan_v.json}"), ProfileError,
         "given for TITAN, but"),
        ((*PAPER, "parallel=hete_mp"), ConfigError, "task=partition runs as one process"),
        ((*PAPER, "task.order=by_price"), ConfigError, "by_price"),
        ((*PAPER, "task.search=exact", "task.order=by_speed"), ConfigError, "not use order"),
        ((*PAPER, "task.levels=true"), ConfigError, "hete_mp does not use levels"),
        ((*PAPER, "task.search=exhaustive"), PlanError, "exhaustive would try"),
        ((*PAPER, "task.bandwidth_bytes_per_s=0"), HardwareError, "0"),
        ((*PAPER, "task.reserved_bytes=12e9"), PlanError, "no plan fits"),
        ((*PAPER, "++task.profiles={TITAN V: nowhere.json}"), ProfileError, "nowhere.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, "task=partition", *overrides)
    assert not list(tmp_path.glob("*/*/DONE.json"))


def test_what_the_paper_prints_of_hete_mp_is_costed_as_it_stands() -> None:
    groups = {6: [(0, 0, 4), (1, 0, 0), (0, 1, 0)], 8: [(0, 3, 4), (1, 0, 0)]}
    for gpus, devices in groups.items():
        inventory = paper_inventory(gpus)
        problem = Problem.of(
            inventory,
            load_profiles(inventory, "sparse_vgg16_bn", given={}),
            model=cost_model("sparsepipe_hete"),
            bandwidth_bytes_per_s=60e6,
        )
        # The best cuts on the paper's devices begin with its own one at 60 MB/s.
        best = best_cuts(problem, devices)
        assert best.stages[0].end == 24
        assert hete_mp_s(problem, PRINTED[gpus]) == explain(problem, best).bottleneck_s
        other = PaperRow(mp="", hete_mp=PRINTED[gpus].hete_mp[::-1])
        assert hete_mp_s(problem, other) > explain(problem, best).bottleneck_s
    assert [row.hete_config for row in PRINTED.values()] == ["4-1", "4-1-1", "6-1", "7-1"]


@pytest.mark.parametrize(
    ("recompute", "bottleneck_s", "spans"),
    [("none", 9.0, None), ("all", 12.0, [[0, 1], [2, 3]]), ("auto", 10.0, [[0, 0], [3, 3]])],
)
def test_what_a_synchronous_pipeline_recomputes_counts(
    tmp_path: Path, recompute: str, bottleneck_s: float, spans: list[list[int]] | None
) -> None:
    """On four layers of 3, 6, 6 and 3 s; by ``auto`` so much that 1.4 MB are enough."""
    memory_bytes = 1_000_000_000 if recompute == "none" else 1_400_000
    device = f"{{name: core, count: 2, accelerator: cpu, memory_bytes: {memory_bytes}}}"
    done = run(
        tmp_path,
        *MODEL,
        "task=partition",
        "hardware=cores",
        f"hardware.value.hosts=[{{name: here, devices: [{device}]}}]",
        "parallel=gpipe",
        "parallel.devices=1",
        f"parallel.strategy.recompute={recompute}",
        "task.bandwidth_bytes_per_s=1e4",
        f"task.profiles={{core: {saved(tmp_path / 'four.json')}}}",
    )
    plan = Plan.from_json(done.plan.read_text())
    assert (plan.config, plan.cuts) == ("1-1", (2,))
    assert plan.details["bottleneck_s"] == pytest.approx(bottleneck_s)
    assert plan.details.get("recomputed") == spans
    assert read_json(done.result)["bottleneck_s"] == plan.details["bottleneck_s"]


@pytest.mark.parametrize("task", ["partition", "paper/table3", "profile", "fit_batch"])
def test_several_processes_are_refused(task: str) -> None:
    several = ("parallel=dp", "parallel.devices=2", "hardware.cpu_devices=2")
    with pytest.raises(ConfigError, match="asks for 2") as caught:
        resolve_run(composed("experiment=tiny", f"task={task}", *several))
    assert "parallel=single" in caught.value.remedy


def test_one_device_has_one_profile() -> None:
    hosts = [
        {"name": host, "devices": [{"name": "x", "count": 1, "profile": {"net": file}}]}
        for host, file in (("a", "one.json"), ("b", "two.json"))
    ]
    with pytest.raises(ProfileError, match=r"one\.json and two\.json"):
        load_profiles(Inventory.from_dict({"hosts": hosts}), "net", given={})
