"""The task simulate, from the configuration to its files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from sparsepipe.config.build import build_inventory
from sparsepipe.errors import ConfigError, HardwareError, PlanError, ProfileError, ScheduleError
from sparsepipe.launch.job import run_job
from sparsepipe.schedule import Plan
from sparsepipe.tasks.simulate import in_one_process
from tests.support.command_line import composed
from tests.support.emulated_cases import profile
from tests.support.resolved import run_directory
from tests.support.simulated_cases import BY_HAND, PAPER, SEARCHED, layers_s, result, run


@pytest.mark.parametrize("settings", [("task=partition",), ("task=simulate", "parallel=hete_mp")])
def test_devices_of_all_kinds_with_a_profile_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: tuple[str, ...]
) -> None:
    """A CPU beside a GPU, neither of which is here; the CPU's profile is another device's."""
    files = {"TITAN V": "titan_v", "A CPU": "titan_xp"}
    devices = [
        {"name": name, "count": 1, "accelerator": "cpu" if "CPU" in name else "cuda",
         "profile": {"sparse_vgg16_bn": f"profiles/paper/{file}.json"}}
        for name, file in files.items()
    ]  # fmt: skip
    host = {"name": "h", "devices": devices, "link": {"bytes_per_s": 12e9}}
    (tmp_path / "mixed.yaml").write_text(json.dumps({"hosts": [host]}))
    mixed = ("hardware=file", f"hardware.source={tmp_path / 'mixed.yaml'}")
    done = run_job(composed(f"paths.outputs={tmp_path}", *mixed, *settings))
    assert result(done)["hardware_accelerator"] == "cpu, cuda"
    told = [text for text in caplog.messages if "under other conditions" in text]
    assert [text.partition(": ")[2] for text in told] == [
        "A CPU was measured with device TITAN Xp, not A CPU"
    ]
    with pytest.raises(HardwareError, match="mixes several kinds of devices: cpu, cuda"):
        run_job(composed(f"paths.outputs={tmp_path}", *mixed, "experiment=tiny", "parallel=dp"))


def test_a_searched_plan_with_all_its_files(tmp_path: Path) -> None:
    done = run(tmp_path, *SEARCHED)
    plan = Plan.from_json(done.plan.read_text())
    assert (plan.config, plan.cuts) == ("4-1", (24,))
    assert plan.details["bandwidth_bytes_per_s"] == 60e6
    found = result(done)
    assert found["kind"] == "simulated"
    assert found["task_name"] == "simulate"
    assert found["plan_config"] == "4-1"
    assert found["ranks"] == 1, "the simulation itself is one process"
    assert found["shapes_per_minibatch"] == 64, "as it was measured, whatever data say"
    assert found["simulated_shapes_per_s"] == pytest.approx(64 / found["minibatch_s"])
    assert found["speedup_over_dp"] == pytest.approx(found["dp_minibatch_s"] / found["minibatch_s"])
    assert found["speedup_over_dp"] > 1
    rows = list(csv.DictReader((done.path / "devices.csv").open()))
    assert [row["device"] for row in rows] == [d for s in plan.stages for d in s.devices]
    assert [row["last_layer"] for row in rows] == ["23"] * 4 + ["51"]
    for row in rows:
        assert row["kind"] == "simulated"
        assert float(row["busy_share"]) + float(row["bubble_share"]) == pytest.approx(1)
        assert 0 < float(row["busy_share"]) <= 1
        assert float(row["peak_bytes"]) > 0
    apart = found["dp_without_overlap_minibatch_s"]
    assert apart > found["dp_minibatch_s"], "sums that wait for the backward take longer"
    assert found["speedup_over_dp_without_overlap"] == pytest.approx(apart / found["minibatch_s"])
    told = (done.path / "simulation.txt").read_text()
    assert "4-1, simulated" in told
    overlaps, follows = told.splitlines()[-2:]
    assert overlaps.startswith(f"{found['speedup_over_dp']:.2f}x as fast as data parallelism")
    assert "whose sums overlap with the backward" in overlaps
    assert follows.startswith(f"{found['speedup_over_dp_without_overlap']:.2f}x as fast")
    assert follows.endswith("whose sums follow the backward")
    trace = json.loads((done.path / "trace.json").read_text())
    assert trace["otherData"]["kind"] == "simulated"
    assert {e["pid"] for e in trace["traceEvents"] if e["ph"] == "X"} >= set(range(5))
    computed = [e for e in trace["traceEvents"] if e.get("cat") == "forward" and e["pid"] == 4]
    assert len(computed) == 3
    with Image.open(done.path / "timeline.png") as picture:
        assert picture.width > 1000


def test_stages_are_as_busy_as_their_layers_take(tmp_path: Path) -> None:
    """On links without limit a device of stage 0 computes one of four minibatches."""
    done = run(tmp_path, *BY_HAND, "task.link_bytes_per_s=1e15")
    found = result(done)
    rows = list(csv.DictReader((done.path / "devices.csv").open()))
    seconds = {
        "server1/TITAN V/0": layers_s("titan_v.json", slice(0, 24)) / 4,
        "server2/RTX 2080 Ti/0": layers_s("rtx_2080_ti.json", slice(0, 24)) / 4,
        "server2/RTX 2080 Ti/3": layers_s("rtx_2080_ti.json", slice(24, 52)),
    }
    busy = {row["device"]: float(row["busy_share"]) for row in rows}
    assert [row["stage"] for row in rows] == ["0", "0", "0", "0", "1"]
    for device, own_s in seconds.items():
        assert busy[device] == pytest.approx(own_s / found["minibatch_s"], rel=1e-3)


def test_data_parallelism_waits_for_the_slowest_and_for_its_sums(tmp_path: Path) -> None:
    apart = result(run(tmp_path, *PAPER, "parallel=dp", "task.overlap=false"))
    slowest_s = max(
        layers_s("titan_v.json", slice(None)), layers_s("rtx_2080_ti.json", slice(None))
    )
    weights = json.loads(Path("sparsepipe/assets/profiles/paper/titan_v.json").read_text())[
        "layers"
    ]
    size = sum(layer["parameter_bytes"] for layer in weights)
    round_s = slowest_s + 2 * 4 / 5 * size / 125e6  # a ring over the link between the servers
    assert apart["minibatch_s"] == pytest.approx(round_s / 5, rel=1e-6)
    assert apart["speedup_over_dp"] == apart["epoch_speedup_over_dp"] == 1
    assert apart["speedup_over_dp_without_overlap"] == 1
    assert apart["dp_without_overlap_minibatch_s"] == apart["minibatch_s"]
    assert apart["plan_config"] == "5"
    at_once = result(run(tmp_path, *PAPER, "parallel=dp"))
    assert at_once["speedup_over_dp"] == 1
    assert at_once["dp_without_overlap_minibatch_s"] == apart["minibatch_s"]
    assert at_once["speedup_over_dp_without_overlap"] == pytest.approx(
        apart["minibatch_s"] / at_once["minibatch_s"]
    )
    assert slowest_s / 5 < at_once["minibatch_s"] < apart["minibatch_s"]
    faster = result(run(tmp_path, *PAPER, "parallel=dp", "task.link_bytes_per_s=1.25e9"))
    assert faster["minibatch_s"] < at_once["minibatch_s"]


def test_replicas_on_two_servers_sum_in_a_chain(tmp_path: Path) -> None:
    """P crosses the link in place of 2 x 3 / 4 P; all else stays the same. Data parallelism, with
    which it is compared, sums in a ring, whatever is said of the replicas of a stage.
    """
    slow = (*BY_HAND, "task.link_bytes_per_s=2e6")  # so that it waits for its sums
    found = result(run(tmp_path, *slow))
    chain, direct, ring = (
        result(run(tmp_path, *slow, f"task.all_reduce={way}"))
        for way in ("chain", "direct", "ring")
    )
    assert found["minibatch_s"] == chain["minibatch_s"] < direct["minibatch_s"]
    assert ring["minibatch_s"] < direct["minibatch_s"]
    assert ring["dp_minibatch_s"] == direct["dp_minibatch_s"]


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["gpipe", "sync_1f1b", "eager_1f1b"])
def test_a_synchronous_pipeline_is_simulated_as_it_trains(tmp_path: Path, parallel: str) -> None:
    schedule = parallel.removeprefix("sync_")
    own = [word.replace("parallel=pipeline", f"parallel={parallel}") for word in BY_HAND]
    found = result(run(tmp_path, *own, "parallel.strategy.microbatches=6"))
    told = run(tmp_path, *BY_HAND, f"task.schedule={schedule}", "task.microbatches=6")
    assert (found["schedule"], found["microbatches"]) == (schedule, 6)
    assert (found["strategy"], result(told)["strategy"]) == (parallel, "pipeline")
    for key in ("minibatch_s", "epoch_s"):
        assert found[key] == result(told)[key]
    stale = result(run(tmp_path, *own, "task.schedule=asynchronous"))
    assert (stale["schedule"], stale["microbatches"]) == ("asynchronous", 1)


def test_of_many_devices_some_are_listed_and_drawn(tmp_path: Path) -> None:
    profile().save(tmp_path / "mlp.json")
    device = f"{{name: gpu, count: 20, profile: {{mlp: {tmp_path / 'mlp.json'}}}}}"
    listed = ", ".join(
        f"{{name: host{host}, link: {{bytes_per_s: 1e9}}, devices: [{device}]}}" for host in (0, 1)
    )
    many = (
        "experiment=tiny",
        "task=simulate",
        "hardware=cores",
        f"hardware.value.hosts=[{listed}]",
        "+hardware.value.link={bytes_per_s: 1e8}",
        "parallel=pipeline",
        "parallel.plan.config=37-1-1-1",
        "parallel.plan.cuts=[1,2,3]",
    )
    done = run(tmp_path, *many)
    assert len(list(csv.DictReader((done.path / "devices.csv").open()))) == 40
    told = (done.path / "simulation.txt").read_text()
    assert told.count("| host") == 32
    assert "and 8 more, in devices.csv" in told
    trace = json.loads((done.path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace if event["name"] == "process_name"} >= set(range(40))
    with Image.open(done.path / "timeline.png") as picture:
        # Eight replicas of the first stage and three others, with what they have on its way.
        assert picture.height < 40 * 0.44 * 144


def test_a_plan_file_runs_on_the_devices_that_it_names(tmp_path: Path) -> None:
    first = run(tmp_path, *SEARCHED)
    again = run(tmp_path, *PAPER, "parallel=pipeline", f"parallel.plan.file={first.plan}")
    assert again.path != first.path
    assert result(again)["minibatch_s"] == result(first)["minibatch_s"]
    assert result(again)["plan_devices"] == result(first)["plan_devices"]
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(first.plan.read_text().replace("TITAN V/0", "TITAN Z/0"))
    with pytest.raises(PlanError, match=r"the plan is for .*server1/TITAN Z/0") as caught:
        run(tmp_path, *PAPER, "parallel=pipeline", f"parallel.plan.file={elsewhere}")
    assert "choose the hardware" in caught.value.remedy


@pytest.mark.parametrize(
    ("overrides", "error", "message", "remedy"),
    [
        (PAPER, ConfigError, "nothing to simulate", "parallel=dp"),
        (
            (*PAPER, "parallel=dp", "task.schedule=gpipe"),
            ConfigError,
            "gpipe is for pipelines",
            "parallel=hete_mp",
        ),
        ((*BY_HAND, "parallel.plan.cuts=[52]"), PlanError, "do not split 52 layers", "1 to 51"),
        (
            (*BY_HAND, "parallel.plan.config=4-2"),
            HardwareError,
            "for 6 devices, but the inventory has 5",
            "fewer devices",
        ),
        ((*BY_HAND, "task.minibatches=0"), ConfigError, "task.minibatches", ""),
        ((*BY_HAND, "task.outbox=0", "task.inbox=0"), ScheduleError, "deadlock", "outbox"),
        (
            ("task=simulate", "hardware=local", "hardware.accelerator=cpu", "parallel=dp"),
            ProfileError,
            "no profile of",
            "task=profile",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_and_leaves_nothing(
    tmp_path: Path, overrides: tuple[str, ...], error: type[Exception], message: str, remedy: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        run(tmp_path, *overrides)
    assert remedy in caught.value.remedy  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("*/*/result.json"))
    assert not list(tmp_path.glob("*/*/config.yaml"))


SEVEN_GPUS = ("task=simulate", "hardware=paper_7gpu", "task.timeline_minibatches=1")


def identity(outputs: Path, *overrides: str) -> str:
    config = composed(f"paths.outputs={outputs}", *SEVEN_GPUS, *overrides)
    inventory = build_inventory(config)
    return run_directory(in_one_process(config), inventory).run_id


def plan_and_pace(outputs: Path, *overrides: str) -> tuple[list[object], float]:
    done = run_job(composed(f"paths.outputs={outputs}", *SEVEN_GPUS, *overrides))
    plan = Plan.from_json(done.plan.read_text())
    stages: list[object] = [(stage.layers, stage.devices) for stage in plan.stages]
    return stages, float(json.loads(done.result.read_text())["minibatch_s"])


def test_a_plan_is_searched_for_the_link_that_is_simulated(tmp_path: Path) -> None:
    """As it is for an inventory that has such a link."""
    slow = plan_and_pace(tmp_path, "parallel=exact", "task.link_bytes_per_s=10e6")
    same = plan_and_pace(tmp_path, "parallel=exact", "hardware.value.link.bytes_per_s=10e6")
    assert slow == same
    fast, _ = plan_and_pace(tmp_path, "parallel=exact", "task.link_bytes_per_s=10e9")
    assert slow[0] != fast


def test_a_bandwidth_of_the_search_comes_before_the_link(tmp_path: Path) -> None:
    at_60 = ("parallel=hete_mp", "parallel.search.bandwidth_bytes_per_s=60e6")
    slow, slow_s = plan_and_pace(tmp_path, *at_60, "task.link_bytes_per_s=10e6")
    fast, fast_s = plan_and_pace(tmp_path, *at_60, "task.link_bytes_per_s=10e9")
    assert slow == fast
    assert fast_s < slow_s


@pytest.mark.parametrize("parallel", ["dp", "paper_mp"])
def test_what_searches_nothing_has_no_settings_of_searches(tmp_path: Path, parallel: str) -> None:
    settings = ("bandwidth_bytes_per_s=60e6", "cost_model=eq4", "reserved_bytes=1e9", "search=mp")
    chosen = [f"parallel.search.{setting}" for setting in settings]
    assert identity(tmp_path, f"parallel={parallel}", *chosen) == identity(
        tmp_path, f"parallel={parallel}"
    )
