"""A plan over several hosts: real agents, one for each, on the loopback."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

from sparsepipe.errors import PlanError
from sparsepipe.launch.renumber import Process, new_ranks
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.schedule import Plan
from sparsepipe.utils.files import read_json
from tests.support.command_line import Finished, Shell

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
    with pytest.raises(PlanError, match="there are to be 2 on a, 3 on b") as refused:
        new_ranks(processes(*of_nodes), [(1, 4), (0, 2, 3)], ["a", "b"])
    assert "--nproc-per-node" in refused.value.remedy
