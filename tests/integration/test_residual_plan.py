"""A measured sparse ResNet through task=partition: when data parallelism is best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from tests.integration.test_shapes_run import TINY

Job = Callable[..., Path]
RESNET = (
    *(item for item in TINY if "gallery" not in item),
    "model=sparse_resnet18",
    "hardware=local",
    "hardware.accelerator=cpu",
)
BEST = "data parallelism is the best plan"


@pytest.fixture
def partition(job: Job) -> Callable[..., Path]:
    """Splits one measured profile over four devices like the one it was measured on."""
    measured = job(*RESNET, "task=profile", "task.num_warmup=1", "task.num_measured=3")
    found = Profile.load(measured / "profile.json")
    kinds = [layer.kind for layer in found.layers]
    assert kinds.count("ResidualBlock") == 8
    assert len(kinds) == 15
    given = f"++task.profiles={{{found.meta['device']}: {measured / 'profile.json'}}}"
    return lambda *more: job(*RESNET, "task=partition", "hardware.cpu_devices=4", given, *more)


@pytest.mark.full
def test_the_partitioner_says_when_data_parallelism_is_best(
    partition: Callable[..., Path],
) -> None:
    """With whatever times were measured: at the ends of the range they decide nothing.

    Where links cost nothing, all devices on all layers are busy all the time, as no split is
    that is not perfectly even. Where they cost everything, it counts that four devices exchange
    all parameters for each minibatch, and that few activations cross a cut near the end.
    """
    for search in ("exact", "hete_mp", "mp"):
        fast = partition(f"task.search={search}", "task.bandwidth_bytes_per_s=1e18")
        told = (fast / "plan.txt").read_text()
        assert BEST in told, told
        assert Plan.from_json((fast / "plan.json").read_text()).config == "4"
    result = json.loads((fast / "result.json").read_text())
    assert result["dp_s"] == result["bottleneck_s"]
    slow = partition("task.search=exact", "task.bandwidth_bytes_per_s=1")
    told = (slow / "plan.txt").read_text()
    assert BEST not in told
    assert "x as fast as data parallelism" in told
    result = json.loads((slow / "result.json").read_text())
    assert result["dp_s"] > 10 * result["bottleneck_s"]
