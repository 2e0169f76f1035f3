"""Whether profiles that are given were measured as the training will compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.errors import ProfileError
from sparsepipe.partition.explanation import rank_times
from sparsepipe.planning.device_profiles import (
    as_loaded,
    check_measured,
    fingerprint_of,
)
from sparsepipe.planning.search import find_plan
from sparsepipe.profiling import Profile
from tests.support.command_line import composed
from tests.support.planned_cases import MODEL, SLOW, TWO, profile

TWO_SPEEDS = ("experiment=tiny", "hardware=two_speeds", "parallel=hete_mp")
AS_IT_WILL_BE = {
    "slowdown": 2.0,
    "backend": "NativeBackend",
    "device": "half-speed",
    "dtype": "float32",
    "threads": 3,
    "optimizer": "torch.optim.SGD momentum",
}


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


@pytest.mark.parametrize(
    ("settings", "cuts", "bottleneck_s"),
    [
        (("data.num_workers=0",), (1,), 3.0),
        ((), (1,), 3.0),  # on few cores there are no workers
        (("data.num_workers=2",), (2,), 2.0),
    ],
)
def test_the_first_stage_has_fewer_layers_where_it_reads_batches_itself(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], cuts: tuple[int, ...],
    bottleneck_s: float,
) -> None:  # fmt: skip
    """Of four layers of a second each, and two seconds of reading."""
    monkeypatch.setattr("sparsepipe.data.dataloaders.usable_cores", lambda: 6)
    config = composed(*MODEL, *TWO, SLOW, "parallel=exact", *settings)
    inventory = build_inventory(config)
    (name,) = {device.name for host in inventory.hosts for device in host.devices}
    own = replace(profile([1.0] * 4), meta={"load_s": 2.0})
    assert config.plan_search is not None
    plan = find_plan(config.plan_search, config, inventory, {name: own}).plan
    assert plan.cuts == cuts
    assert plan.details["bottleneck_s"] == pytest.approx(bottleneck_s)
    assert ["load" in each for each in rank_times(plan)] == [bottleneck_s > 2, False]
    emulated = as_loaded({name: own}, composed(*MODEL, *TWO, "hardware.emulate=true"), inventory)
    assert emulated[name].load_s is None, "it reads nothing"


@pytest.mark.parametrize("workers", ["null", "0"])
def test_a_fingerprint_knows_whether_reading_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    config = composed("model=sparse_vgg11_bn", *TWO, f"data.num_workers={workers}")
    inventory = build_inventory(config)
    name = inventory.hosts[0].devices[0].name

    def fingerprint(cores: int, meta: dict[str, Any]) -> str:
        monkeypatch.setattr("sparsepipe.data.dataloaders.usable_cores", lambda: cores)
        file = Profile(layers=profile([1.0]).layers, meta=meta).save(tmp_path / "profile.json")
        return fingerprint_of(inventory, config.model.name, given={name: str(file)}, spec=config)

    is_alike = fingerprint(2, {"load_s": 2.0}) == fingerprint(64, {"load_s": 2.0})
    assert is_alike == (workers == "0")
    assert fingerprint(2, {}) == fingerprint(64, {})


def check(meta: dict[str, Any], *settings: str, inventory: Inventory | None = None) -> None:
    """Of a profile of the device that is half as fast."""
    config = composed(*TWO_SPEEDS, *settings)
    found = {"half-speed": Profile(layers=profile([1]).layers, meta=meta)}
    check_measured(found, config, inventory or build_inventory(config))


@pytest.mark.parametrize("meta", [AS_IT_WILL_BE, {"source": "somebody else"}, {"slowdown": 2}])
def test_matching_workloads_give_no_messages(
    meta: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    check(meta)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("slowdown", 1.0, "slowdown 1, not 2"),
        ("backend", "MinkowskiEngine", "backend MinkowskiEngine, not NativeBackend"),
        ("device", "full-speed", "device full-speed, not half-speed"),
        ("dtype", "float64", "dtype float64, not float32"),
        ("matmul_precision", "high", "matmul_precision high, not highest"),
        ("threads", 4, "threads 4, not 3"),
        ("optimizer", "torch.optim.AdamW", "optimizer torch.optim.AdamW, not torch.optim.SGD"),
    ],
)
def test_profiles_measured_otherwise_are_refused_or_warned_of(
    name: str, value: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = f"half-speed was measured with {words}"
    if name in ("slowdown", "backend"):
        with pytest.raises(ProfileError, match=words) as told:
            check({**AS_IT_WILL_BE, name: value})
        assert "task=profile" in told.value.remedy
    else:
        check({**AS_IT_WILL_BE, name: value})
        assert [words in message for message in caplog.messages] == [True]


def test_threads_are_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("sparsepipe.planning.device_profiles.usable_cores", lambda: 9)
    check({**AS_IT_WILL_BE, "threads": 4})
    assert not caplog.records
    check({**AS_IT_WILL_BE, "threads": 9})
    assert "threads 9, not 4" in caplog.text
