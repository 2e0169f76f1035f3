"""How the replicas of a simulated stage sum, from the configuration to the pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsepipe.launch.job import run_job
from tests.support.command_line import composed

# The first stage has the TITAN V of one server and three RTX of the other.
OVER_TWO_SERVERS = (
    "task=simulate",
    "hardware=paper_5gpu",
    "parallel=pipeline",
    "parallel.plan.config=4-1",
    "parallel.plan.cuts=[24]",
    "task.timeline_minibatches=1",
    "task.link_bytes_per_s=2e6",  # so that it waits for its sums
)


def minibatch_s(outputs: Path, *overrides: str) -> float:
    return float(result(outputs, *overrides)["minibatch_s"])


def result(outputs: Path, *overrides: str) -> dict[str, Any]:
    done = run_job(composed(f"paths.outputs={outputs}", *OVER_TWO_SERVERS, *overrides))
    return dict(json.loads(done.result.read_text()))


def test_replicas_on_two_servers_sum_in_a_chain(tmp_path: Path) -> None:
    """P crosses the link in place of 2 x 3 / 4 P; all else stays the same."""
    found = minibatch_s(tmp_path)
    assert found == minibatch_s(tmp_path, "task.all_reduce=chain")
    assert found < minibatch_s(tmp_path, "task.all_reduce=direct")


def test_data_parallelism_is_compared_as_it_trains(tmp_path: Path) -> None:
    """In a ring, whatever is said of the replicas of a stage."""
    ring, direct = (result(tmp_path, f"task.all_reduce={way}") for way in ("ring", "direct"))
    assert ring["minibatch_s"] < direct["minibatch_s"]
    assert ring["dp_minibatch_s"] == direct["dp_minibatch_s"]
