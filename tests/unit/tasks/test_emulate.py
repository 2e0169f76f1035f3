"""task=emulate: the same run as task=train hardware.emulate=true, or a contradiction told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.emulate import as_emulated, minibatches_per_reader
from sparsepipe.tasks.task import task_of
from tests.support.command_line import composed
from tests.support.emulated_cases import hosts, path_of
from tests.support.resolved import resolved

pytestmark = pytest.mark.usefixtures("workplace")
EMULATE = "task=emulate"


def asked(*overrides: str) -> RunSpec:
    return as_emulated(composed(*overrides))


@pytest.mark.full
def test_both_spellings_are_the_same_run(tmp_path: Path) -> None:
    *here, by_hardware = hosts(tmp_path)
    by_task = (*here, "parallel=dp", EMULATE)
    first = path_of(*here, by_hardware, "parallel=dp")
    assert path_of(*by_task) == first
    slower = path_of(*here, by_hardware, "parallel=dp", "hardware.time_scale=4")
    assert path_of(*by_task, "task.time_scale=4") == slower != first
    assert path_of(*by_task, "hardware.emulate=true") == first
    assert path_of(*by_task, "hardware.time_scale=4") == slower, "what the task leaves out"
    assert path_of(*by_task, "hardware.time_scale=4", "task.time_scale=4") == slower
    assert path_of(*by_task, "task.link_bytes_per_s=20e6") == first, "as the inventory has it"
    others = [
        path_of(*by_task, other)
        for other in ("task.link_bytes_per_s=30e6", "task.minibatches=60", "task.network=loopback")
    ]
    assert len({first, slower, *others}) == 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("task.time_scale=5", "task.link_bytes_per_s=3e6"), (5, "auto", 3e6)),
        (("hardware.time_scale=10", "hardware.network=loopback", "hardware.link_bytes_per_s=3e6"),
         (10, "loopback", 3e6)),
        ((), (1, "auto", 20e6)),
    ],
)  # fmt: skip
def test_task_and_hardware_say_the_same(
    tmp_path: Path, given: tuple[str, ...], expected: tuple[float, str, float]
) -> None:
    *here, _ = hosts(tmp_path)
    config = asked(*here, EMULATE, *given)
    inventory = build_inventory(config)
    assert inventory.link is not None
    assert inventory.accelerator == "cpu"
    time_scale, network = (config.task.get(name) for name in ("time_scale", "network"))
    assert (time_scale, network, inventory.link.bytes_per_s) == expected
    assert config.emulation is not None
    assert (config.emulation.time_scale, config.emulation.network) == expected[:2]
    assert as_emulated(config) == config, "asked once more, it is as it was"


@pytest.mark.parametrize(
    ("overrides", "said", "remedy"),
    [
        (["hardware.emulate=false"], r"hardware\.emulate=False, but task=emulate", "task=train"),
        (["hardware.time_scale=5", "task.time_scale=1"],
         r"hardware\.time_scale=5, but task=emulate sets it to 1", "leave hardware.time_scale out"),
        (["task.time_scale=0"], r"time_scale' must be greater than or equal to 0\.001",
         "leave it out"),
        (["task.minibatches=60", "trainer.limit_train_batches=8"],
         r"minibatches=60 and trainer\.limit_train_batches=8 are set", "task.minibatches"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(overrides: list[str], said: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        asked("experiment=tiny", EMULATE, *overrides)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("overrides", "each"),
    [
        (["parallel=dp"], 7),  # 20 over three ranks
        (["parallel=pipeline", "parallel.plan.config=2-1", "parallel.plan.cuts=[2]"], 10),
        (["parallel=pipeline", "parallel.plan.config=1-2", "parallel.plan.cuts=[2]"], 20),
        (["parallel=pipeline", "parallel.plan.balance=layers"], 20),
    ],
)
def test_minibatches_are_of_all_ranks_that_read(
    tmp_path: Path, overrides: list[str], each: int
) -> None:
    config = asked(*hosts(tmp_path), EMULATE, *overrides)
    inventory = build_inventory(config)
    config = task_of(config).configured(config, inventory)
    run = resolved(config, inventory, directory=RunDir(tmp_path))
    assert minibatches_per_reader(run, 20) == each
    assert minibatches_per_reader(run, None) == 24
    limited = replace(run, spec=config.replace({"trainer.limit_train_batches": 9}))
    assert minibatches_per_reader(limited, None) == 9
