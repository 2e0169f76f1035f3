"""The task partition, over PipeDream's files of graphs that branch."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.errors import PlanError, ProfileError
from sparsepipe.plots import style
from sparsepipe.plots.shares import LayerShares, accumulated_shares_figure
from sparsepipe.schedule import Plan
from tests.support.simulated_cases import run

PAPER = ("task=partition", "hardware=paper_8gpu", "task.bandwidth_bytes_per_s=60e6")


GRAPH = """\
in -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, \
activation_size=8.0, parameter_size=0.0
a -- Conv2d(3, 8) -- forward_compute_time={0}.0, backward_compute_time=4.0, \
activation_size=100.0, parameter_size=10.0
b -- Conv2d(8, 8) -- forward_compute_time={0}.0, backward_compute_time=6.0, \
activation_size=100.0, parameter_size=10.0
c -- Add -- forward_compute_time=1.0, backward_compute_time=1.0, \
activation_size=100.0, parameter_size=0.0
\tin -- a
\ta -- b
\ta -- c
\tb -- c
"""


def graphs(directory: Path, text: str = GRAPH) -> str:
    """An override: a file of the graph for each of the paper's GPUs, of other times."""
    files = {}
    for place, name in enumerate(("TITAN V", "TITAN Xp", "RTX 2080 Ti")):
        path = directory / f"graph{place}.txt"
        path.write_text(text.replace("{0}", str(3 + place)))
        files[name] = str(path)
    return f"++task.profiles={{{', '.join(f'{name}: {path}' for name, path in files.items())}}}"


@pytest.mark.parametrize("search", ["hete_mp", "exact", pytest.param("mp", marks=pytest.mark.full)])
def test_a_branching_graph(tmp_path: Path, search: str) -> None:
    done = run(tmp_path, *PAPER, f"task.search={search}", graphs(tmp_path))
    plan = Plan.from_json(done.plan.read_text())
    held = [name for names in plan.details["stage_nodes"] for name in names]
    assert plan.num_layers == 3
    assert plan.details["states"] is True
    assert sorted(held) == ["a -- Conv2d(3, 8)", "b -- Conv2d(8, 8)", "c -- Add"]
    costs = {  # a plan's cuts are states, which are not drawn
        name: LayerShares(
            compute_s=[place + 3 + 4, place + 3 + 6, 2],
            activation_bytes=[100, 100, 100],
            parameter_bytes=[10, 10, 0],
        )
        for place, name in enumerate(("TITAN V", "TITAN Xp", "RTX 2080 Ti"))
    }
    style.save_png(accumulated_shares_figure(costs), tmp_path / "expected.png")
    assert (done.path / "shares.png").read_bytes() == (tmp_path / "expected.png").read_bytes()
    told = (done.path / "plan.txt").read_text()
    assert "| states" in told
    assert "hold these nodes\nstage 0: a" in told
    with pytest.raises(PlanError, match="divides a branching graph"):
        run(tmp_path, "parallel=pipeline", f"parallel.plan.file={done.plan}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (GRAPH.replace("\ta -- b", "\ta -- z"), "graph0.txt: line 6 is neither .*'z'"),
        ("", "no layers"),
    ],
)
def test_a_malformed_graph_is_refused_with_its_line(
    tmp_path: Path, changed: str, message: str
) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        run(tmp_path, *PAPER, graphs(tmp_path, changed))
    assert "PipeDream" in caught.value.remedy


def test_other_edges_on_another_device_are_refused(tmp_path: Path) -> None:
    given = graphs(tmp_path)
    other = tmp_path / "graph1.txt"
    other.write_text(other.read_text().replace("\ta -- c\n", ""))
    with pytest.raises(ProfileError, match="different layers or edges"):
        run(tmp_path, *PAPER, given)
