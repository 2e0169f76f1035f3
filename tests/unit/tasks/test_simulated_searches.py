"""Plans that the task simulate searches for, on the links of the inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.schedule import Plan
from tests.support.simulated_cases import BY_HAND, PAPER, layers_s, result, run


@pytest.mark.full  # three searches and simulations
def test_mp_and_exact_are_searched_for_the_links_that_there_are(tmp_path: Path) -> None:
    """Without one bandwidth for all links, as ``-m parallel=dp,mp,hete_mp,exact`` asks for them."""
    files = {"TITAN V": "titan_v.json", "RTX 2080 Ti": "rtx_2080_ti.json"}
    found = {}
    for strategy in ("mp", "exact"):
        done = run(tmp_path, *PAPER, f"parallel={strategy}")
        found[strategy], plan = result(done), Plan.from_json(done.plan.read_text())
        assert plan.details["strategy"] == strategy
        assert plan.details["bandwidth_bytes_per_s"] is None
        assert len({device for stage in plan.stages for device in stage.devices}) == 5
        for stage in plan.stages:  # which no link makes faster than its devices can
            layers = slice(stage.layers[0], stage.layers[1] + 1)
            names = [device.split("/")[1] for device in stage.devices]
            least_s = min(layers_s(files[name], layers) for name in names) / len(names)
            assert found[strategy]["minibatch_s"] >= least_s * (1 - 1e-9)
    by_hand = result(run(tmp_path, *BY_HAND))
    assert found["exact"]["minibatch_s"] < found["mp"]["minibatch_s"]
    assert found["exact"]["minibatch_s"] < by_hand["minibatch_s"], "Table III's, for equal links"
    assert all(each["speedup_over_dp"] > 1 for each in found.values())
