"""Plans over several hosts and unlike devices: who runs where, and that numbers stay."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sparsepipe.cluster import Inventory, places_for
from sparsepipe.config.build import build_inventory
from sparsepipe.errors import ConfigError, HardwareError, PlanError
from sparsepipe.launch.renumber import Process, new_ranks
from sparsepipe.planning.devices import cuda_devices
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.utils.files import read_json
from tests.support.command_line import Finished, Shell, composed
from tests.support.plans import plan_on
from tests.support.resolved import resolved, run_directory

# Two hosts with one and with two devices, of three kinds.
CONFIG = """
_target_: sparsepipe.cluster.Inventory.from_dict
value:
  hosts:
    - name: a
      devices: [{name: slow, count: 1, accelerator: cpu, profile: {mlp: profile.json}}]
    - name: b
      devices:
        - {name: quick, count: 1, accelerator: cpu, profile: {mlp: profile.json}}
        - {name: quicker, count: 1, accelerator: cpu, profile: {mlp: profile.json}}
      link: {bytes_per_s: 1.0e+6}
  link: {bytes_per_s: 1.0e+6}
"""
HOSTS = (
    "hardware=hosts", "parallel=hete_mp", "parallel.num_nodes=2", "model.norm=true",
    "trainer.max_epochs=1", "parallel.search.order=[quick,slow,quicker]",
    "callbacks={nodes: {_target_: tests.support.tinyhouse.Nodes}}",
)  # fmt: skip


def on_hosts(shell: Shell, processes: Sequence[int], *arguments: str) -> list[Finished]:
    """The command under an agent for each host, with so many processes each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(processes)}",
             f"--node-rank={node}", f"--nproc-per-node={count}", "--master-addr=127.0.0.1",
             f"--master-port={port}", "-m", *shell.command(*arguments)],
            cwd=shell.cwd,
            env={**shell.environment, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, count in enumerate(processes)
    ]  # fmt: skip
    return [shell.wait(agent) for agent in agents]


@pytest.fixture
def hosts(shell: Shell) -> Shell:
    """Where the inventory is, with a profile by which each device becomes a stage."""
    group = shell.cwd / "groups" / "hardware"
    group.mkdir(parents=True)
    (group / "hosts.yaml").write_text(CONFIG)
    layers = [
        LayerProfile(index=index, name=str(index), kind="Linear", forward_s=1.0, backward_s=2.0,
                     activation_bytes=100, parameter_bytes=1e9)
        for index in range(5)
    ]  # fmt: skip
    Profile(layers=tuple(layers), meta={"model": "mlp"}).save(shell.cwd / "profile.json")
    return shell


@pytest.mark.full
def test_stages_that_change_between_hosts(hosts: Shell) -> None:
    """The first and the last stage lie on the second host, the one between on the first."""
    searched = f"hydra.searchpath=[file://{hosts.cwd / 'groups'}]"
    done = on_hosts(hosts, (1, 2), *HOSTS, searched)
    assert [agent.code for agent in done] == [0, 0], done
    (run,) = hosts.runs()
    plan = Plan.from_json((run / "plan.json").read_text())
    devices = [device for stage in plan.stages for device in stage.devices]
    assert devices == ["b/quick/0", "a/slow/0", "b/quicker/0"]
    nodes, layers = zip(
        *((hosts.cwd / f"rank{rank}").read_text().split(", ", 1) for rank in range(3)), strict=True
    )
    assert nodes == ("node 1", "node 0", "node 1")
    held = [text.removeprefix("layers ").split(", ") for text in layers]
    with_parameters = ["0", "1", "4"]  # linear, norm, ReLU, dropout, linear
    assert held == [
        [name for name in with_parameters if stage.layers[0] <= int(name) <= stage.layers[1]]
        or [""]
        for stage in plan.stages
    ]
    result = read_json(run / "result.json")
    assert (result["ranks"], result["plan_config"]) == (3, "1-1-1")
    assert (run / "DONE.json").exists()
    assert "".join(agent.out for agent in done) == f"{run}\n", "one rank speaks"
    # The same weights as on one host.
    one = json.loads((run / "plan.json").read_text())
    for stage, rank in zip(one["stages"], itertools.count()):
        stage["devices"] = [f"rank {rank}"]
    (hosts.cwd / "one.json").write_text(json.dumps(one))
    alone = hosts("hardware=cores", "parallel=pipeline", "parallel.plan.file=one.json", *HOSTS[3:5])
    assert read_json(alone.run / "result.json")["test/loss"] == result["test/loss"]


def processes(*of_nodes: tuple[str, int]) -> list[Process]:
    return [
        Process(node=node, host=host, local=local, beside=count)
        for node, (host, count) in enumerate(of_nodes)
        for local in range(count)
    ]


@pytest.mark.parametrize(
    ("of_nodes", "numbers"),
    [
        ([("x", 2), ("y", 3)], [1, 4, 0, 2, 3]),
        # Nodes that are called like the hosts may come in any order.
        ([("b", 3), ("a", 2)], [0, 2, 3, 1, 4]),
        ([("a", 2), ("b", 3)], [1, 4, 0, 2, 3]),
    ],
)
def test_each_process_takes_a_rank_of_its_host(
    of_nodes: list[tuple[str, int]], numbers: list[int]
) -> None:
    assert new_ranks(processes(*of_nodes), [(1, 4), (0, 2, 3)], ["a", "b"]) == numbers


@pytest.mark.parametrize("of_nodes", [[("x", 3), ("y", 2)], [("x", 5)]])
def test_other_numbers_of_processes_are_refused(of_nodes: list[tuple[str, int]]) -> None:
    with pytest.raises(PlanError, match="the run needs 2 on a, 3 on b") as refused:
        new_ranks(processes(*of_nodes), [(1, 4), (0, 2, 3)], ["a", "b"])
    assert "--nproc-per-node" in refused.value.remedy


Job = Callable[..., Path]
SPEEDS = "callbacks={speeds: {_target_: tests.support.tinyhouse.Speeds}}"
SHORT = ("parallel=pipeline", "trainer.max_epochs=1", SPEEDS)


def plan_file(path: Path, *devices: str, **details: object) -> str:
    """A plan for the small network, each device a stage."""
    plan = plan_on(devices[:1], devices[1:], cuts=[2], num_layers=4, **details)
    path.write_text(plan.to_json())
    return f"parallel.plan.file={path}"


def slowdowns(directory: Path) -> list[str]:
    return [(directory / f"speed{rank}").read_text() for rank in range(2)]


@pytest.mark.full
def test_the_plan_says_who_is_slow(shell: Shell) -> None:
    """It gives its first stage to the inventory's second device, and was searched for."""
    told = {"strategy": "exact", "bottleneck_s": 0.5}
    given = shell.cwd / "given.json"
    plan = plan_file(given, "here/half-speed/0", "here/full-speed/0", **told)
    run = shell(*SHORT, "hardware=two_speeds", plan).run
    assert slowdowns(shell.cwd) == ["2.0", "1.0"]
    kept = Plan.from_json((run / "plan.json").read_text())
    assert [stage.devices for stage in kept.stages] == [
        ("here/half-speed/0",), ("here/full-speed/0",)
    ]  # fmt: skip
    assert kept.details == told
    result = read_json(run / "result.json")
    assert result["plan_strategy"] == "exact"
    assert result["plan_shapes_per_s"] == result["data.batch_size"] / 0.5


@pytest.mark.parametrize("host", ["here", "as it was called before"])
def test_a_run_that_goes_on_keeps_its_devices(tmp_path: Path, host: str) -> None:
    directory = RunDir(tmp_path)
    plan_file(directory.plan, f"{host}/half-speed/0", f"{host}/full-speed/0", strategy="hete_mp")
    config = composed("experiment=tiny", "hardware=two_speeds", "parallel=hete_mp")
    places = resolved(config, directory=directory).places
    assert [place.slowdown for place in places] == [2.0, 1.0]
    other = composed("experiment=tiny", "hardware=cores", "parallel=hete_mp")
    with pytest.raises(PlanError, match=f"{host}/half-speed/0"):
        resolved(other, directory=directory)


@pytest.mark.parametrize("parallel", ["single", "pipeline", "dp"])
def test_one_slow_device(job: Job, tmp_path: Path, parallel: str) -> None:
    hosts = "[{name: a, devices: [{name: x, count: 1, accelerator: cpu, slowdown: 1.5}]}]"
    job(
        f"parallel={parallel}",
        "hardware=cores",
        f"hardware.value.hosts={hosts}",
        "trainer.max_epochs=1",
        SPEEDS,
    )
    assert (tmp_path / "speed0").read_text() == "1.5"


def test_a_strategy_that_takes_no_slowdown_is_refused() -> None:
    config = composed(
        "experiment=tiny",
        "hardware=two_speeds",
        "parallel=dp",
        "parallel.strategy={_target_: pytorch_lightning.strategies.DDPStrategy}",
    )
    with pytest.raises(ConfigError, match=r"half-speed/0 .* does not take a slowdown") as caught:
        run_directory(config)
    assert "keyword 'slowdown'" in caught.value.remedy


def test_slowdowns_are_part_of_the_hardware() -> None:
    config = composed("experiment=tiny", "parallel=dp", "++parallel.strategy.slowdown=2.0")
    with pytest.raises(ConfigError, match=r"parallel\.strategy\.slowdown is set") as caught:
        run_directory(config)
    assert "inventory" in caught.value.remedy


def test_stages_on_other_devices_are_another_run(tmp_path: Path) -> None:
    def path(hardware: str, *devices: str) -> Path:
        plan = plan_file(tmp_path / "plan.json", *devices)
        config = composed("experiment=tiny", "parallel=pipeline", f"hardware={hardware}", plan)
        return run_directory(config).path

    full, half = "here/full-speed/0", "here/half-speed/0"
    assert path("two_speeds", full, half) != path("two_speeds", half, full)
    assert path("two_speeds", full, half) == path("two_speeds", "rank 0", "rank 1")
    assert path("cores", full, half) == path("cores", half, full), "it has neither"


def test_gpus_that_are_not_here_are_refused() -> None:
    config = composed("experiment=tiny", "parallel=single", "hardware=paper_5gpu")
    inventory = build_inventory(config)
    places = resolved(config).places
    with pytest.raises(HardwareError, match="server1/TITAN V/0"):
        cuda_devices(places, inventory, rank=0, nodes=1)


def test_each_local_rank_has_the_gpu_of_its_rank() -> None:
    """Ranks 1 and 3 are on the first host, whose GPUs CUDA lists in another order."""
    counts = {"a": {"TITAN V": 1, "RTX 2080 Ti": 2}, "b": {"A100": 2}}
    inventory = Inventory.from_dict(
        {
            "hosts": [
                {"name": host, "devices": [{"name": n, "count": c} for n, c in devices.items()]}
                for host, devices in counts.items()
            ]
        }
    )
    plan = ["b/A100/1", "a/RTX 2080 Ti/1", "b/A100/0", "a/TITAN V/0"]
    places = places_for(inventory, plan, ranks=4, nodes=2)
    gpus = {
        "a": ["NVIDIA GeForce RTX 2080 Ti", "NVIDIA TITAN V", "NVIDIA GeForce RTX 2080 Ti"],
        "b": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"],
    }
    for ranks, host, numbers in (((1, 3), "a", [2, 1]), ((0, 2), "b", [1, 0])):
        for rank in ranks:
            assert cuda_devices(places, inventory, gpus=gpus[host], rank=rank, nodes=2) == numbers
