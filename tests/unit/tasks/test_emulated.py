"""Emulated trainings: what is asked for, what is refused, and what makes a run another one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.emulate import NotPermitted, emulated_layout, machine
from sparsepipe.errors import ConfigError, HardwareError, ProfileError
from sparsepipe.launch.job import hosts_emulated, run_job
from sparsepipe.planning.division import division_of
from sparsepipe.tasks.emulate import as_emulated, emulated_profiles
from sparsepipe.tasks.task import task_of
from tests.support.command_line import composed
from tests.support.emulated_cases import hosts, path_of, profile
from tests.support.namespace_cases import left, needs_namespaces
from tests.support.plans import plan_on
from tests.support.resolved import resolved

pytestmark = pytest.mark.usefixtures("workplace")
EMULATE = "hardware.emulate=true"
LOOPBACK = "hardware.network=loopback"


def asked(*overrides: str) -> tuple[RunSpec, Inventory]:
    config = as_emulated(composed(*overrides))
    return config, build_inventory(config)


@pytest.mark.parametrize("task", ["evaluate", "bandwidth"])
def test_trainings_only_are_emulated(task: str) -> None:
    with pytest.raises(ConfigError, match=f"task={task}") as caught:
        run_job(composed("experiment=tiny", f"task={task}", EMULATE))
    assert "task=train" in caught.value.remedy


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match="under torchrun"):
        run_job(composed("experiment=tiny", EMULATE))


def test_devices_become_processors_and_keep_what_else_they_are() -> None:
    _, inventory = asked("hardware=paper_6gpu", EMULATE)
    plain = build_inventory(composed("hardware=paper_6gpu"))
    assert (plain.accelerator, inventory.accelerator) == ("cuda", "cpu")
    assert inventory.link == plain.link
    assert [[d.name for d in host.devices] for host in inventory.hosts] == [
        ["TITAN V", "TITAN Xp"], ["RTX 2080 Ti"]
    ]  # fmt: skip
    slowed = build_inventory(composed("experiment=tiny", "hardware=two_speeds", EMULATE))
    assert [d.slowdown for d in slowed.hosts[0].devices] == [1.0, 1.0]


@pytest.mark.parametrize(("strategy", "expected"), [("dp", (8, 2)), ("single", (1, 1))])
def test_all_devices_of_all_hosts_take_part(strategy: str, expected: tuple[int, int]) -> None:
    config, inventory = asked("hardware=paper_8gpu", f"parallel={strategy}", EMULATE)
    found = task_of(config).configured(config, inventory).parallel
    assert (found.devices, found.num_nodes) == expected


def test_a_plan_may_name_fewer_devices(tmp_path: Path) -> None:
    names = (["server2/RTX 2080 Ti/1"], ["server2/RTX 2080 Ti/0"])
    (tmp_path / "plan.json").write_text(plan_on(*names, cuts=[10], num_layers=52).to_json())
    plan = f"parallel.plan.file={tmp_path / 'plan.json'}"
    config, inventory = asked("hardware=paper_8gpu", "parallel=pipeline", plan, EMULATE)
    found = task_of(config).configured(config, inventory).parallel
    assert (found.devices, found.num_nodes) == (2, 1)
    assert division_of(task_of(config).configured(config, inventory)) is not None


@pytest.mark.parametrize(
    ("overrides", "said", "remedy"),
    [
        (["parallel=dp", "parallel.devices=3"], r"parallel\.devices=3, but the", "devices=auto"),
        (["parallel=pipeline", "parallel.plan.config=1-1", "parallel.plan.cuts=[3]"],
         "is for 2 devices, but the", "one that names"),
    ],
)  # fmt: skip
def test_other_numbers_of_devices_are_refused(overrides: list[str], said: str, remedy: str) -> None:
    config, inventory = asked("hardware=paper_5gpu", EMULATE, *overrides)
    with pytest.raises(ConfigError, match=said) as caught:
        task_of(config).configured(config, inventory)
    assert remedy in caught.value.remedy


def test_profiles_of_unlike_models_are_refused(tmp_path: Path) -> None:
    overrides = hosts(tmp_path)
    profile(parameter_bytes=8).save(tmp_path / "slow.json")
    config, inventory = asked(*overrides, "parallel=dp")
    with pytest.raises(ProfileError, match="fast and slow are of models with different parameters"):
        emulated_profiles(config, inventory)


def test_profiles_of_unlike_batches_are_refused_emulated_and_simulated(tmp_path: Path) -> None:
    overrides = (*hosts(tmp_path), "parallel=dp")
    profile(slower=2.0, batch_size=32).save(tmp_path / "slow.json")
    said = "fast was profiled with data.batch_size=16, but slow with 32"
    with pytest.raises(ProfileError, match=said) as caught:
        emulated_profiles(*asked(*overrides))
    assert "same data.batch_size" in caught.value.remedy
    *here, _ = overrides[:-1]
    with pytest.raises(ProfileError, match=said):
        run_job(composed(*here, "parallel=dp", "task=simulate"))
    profile(slower=2.0, batch_size=None).save(tmp_path / "slow.json")
    assert set(emulated_profiles(*asked(*overrides))) == {"fast", "slow"}, "it does not tell"


def test_a_run_is_its_profiles_and_links_and_no_data(tmp_path: Path) -> None:
    overrides = (*hosts(tmp_path), "parallel=dp")
    first = path_of(*overrides)
    assert path_of(*overrides, "paths.data=/nowhere") == first
    scaled = path_of(*overrides, "hardware.time_scale=4")
    assert scaled != first
    assert path_of(*overrides, "hardware.network=loopback") not in (first, scaled)
    assert path_of(*hosts(tmp_path, bytes_per_s=30e6), "parallel=dp") != first
    profile(slower=3.0).save(tmp_path / "slow.json")
    assert path_of(*overrides) != first


def test_a_link_too_slow_is_refused_before_ranks_start(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="is too slow to be emulated") as caught:
        run_job(composed(*hosts(tmp_path, bytes_per_s=1e5), "parallel=dp"))
    assert "hardware.time_scale" in caught.value.remedy
    assert not list(tmp_path.glob("outputs/*/*/config.yaml")), "nothing stays of it"


@needs_namespaces
@pytest.mark.parametrize("overrides", [("parallel=dp", LOOPBACK), ("parallel=single",)])
def test_what_a_killed_run_left_goes_before_any_emulation(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Also before one on loopback, and one on a single host, which make no namespaces."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait(60)
    namespace = f"sparsepipe-{ended.pid}-1-511-0"
    machine.do(("ip", "netns", "add", namespace))
    config, inventory = asked(*hosts(tmp_path), *overrides)
    config = task_of(config).configured(config, inventory)
    with hosts_emulated(resolved(config, inventory)):
        assert emulated_layout() is None
        assert left(ended.pid) == []


def test_without_permission_it_says_that_links_are_not_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "may_administer", lambda: False)
    config, inventory = asked(*hosts(tmp_path), "parallel=dp")
    config = task_of(config).configured(config, inventory)
    with caplog.at_level("WARNING"), hosts_emulated(resolved(config, inventory)):
        assert emulated_layout() is None
    assert "the network between hosts is not emulated" in caplog.text
    assert "run as root" in caplog.text
    config = config.replace({"hardware.network": "namespaces"})
    with (
        pytest.raises(NotPermitted, match="may not make network namespaces") as caught,
        hosts_emulated(resolved(config, inventory)),
    ):
        pytest.fail("it has begun")
    assert "run as root" in caught.value.remedy
    assert "hardware.network=loopback" in caught.value.remedy
