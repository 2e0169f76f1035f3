"""A Trainer runs on as many ranks as it asks for, whatever ran before it in the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies import DataParallelStrategy
from sparsepipe.utils.memory import give_freed_memory_back
from tests.support.freed_blocks import kept_mib, needs_glibcs_own
from tests.support.paths import environment
from tests.support.pipeline_cases import QUIET, make_loader, make_net, pipeline_trainer
from tests.support.processes import outcomes, run

SCRIPT = """
import os
from tests.support.pipeline_cases import QUIET, make_loader, make_net, pipeline_trainer
from sparsepipe.errors import ConfigError

def fit(config, cuts):
    trainer = pipeline_trainer(config, cuts, max_epochs=1)
    trainer.fit(make_net("dense"), make_loader("dense", batches=3))
    return trainer

if "LOCAL_RANK" not in os.environ:  # ranks that Lightning starts run the script again
    fit("1", [])
trainer = fit("1-1", [3])
try:
    fit("1", [])
except ConfigError as error:
    print("rank", trainer.global_rank, "of", trainer.world_size, trainer.strategy.plan.config,
          error.message)
"""


def place() -> dict[str, str]:
    """What of this process's environment says which rank it is."""
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize("kind", ["pipeline", "keyed", "dp"])
def test_one_device_leaves_nothing_behind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    before = place()
    if kind == "dp":
        trainer = pl.Trainer(
            **QUIET, devices=1, max_epochs=1, strategy=DataParallelStrategy(timeout_s=60)
        )
    else:
        trainer = pipeline_trainer("1", [], keyed_randomness=kind == "keyed", max_epochs=1)
    net, loader = make_net("dense"), make_loader("dense", batches=2)
    for use in (trainer.fit, trainer.validate):
        use(net, loader)
        assert place() == before
        assert (process_group.world_size(), process_group.started_externally()) == (1, False)
        assert process_group.gather_objects("here") == ["here"]
    assert trainer.world_size == 1


@pytest.mark.full
def test_fits_of_different_size_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 1-1 the Trainer has devices=1" in done.stdout


def asking(rank: int, kind: str, devices: int) -> Any:
    if kind == "dp":
        trainer = pl.Trainer(**QUIET, devices=devices, strategy=DataParallelStrategy(timeout_s=60))
    else:
        trainer = pipeline_trainer("-".join("1" * devices), list(range(1, devices)))
    trainer.validate(make_net("dense"), make_loader("dense", batches=2))


@pytest.mark.parametrize("kind", ["pipeline", "dp"])
@pytest.mark.parametrize("devices", [1, 3])
def test_ranks_that_the_trainer_did_not_ask_for(kind: str, devices: int) -> None:
    """As torchrun starts them with another --nproc_per_node."""
    for end in outcomes(asking, 2, kind, devices, limit_s=60):
        assert isinstance(end.error, ConfigError), end
        assert end.error.message == (
            f"the Trainer has devices={devices} and num_nodes=1, but 2 ranks run"
        )
        assert end.error.remedy


def kept_after_training(rank: int, config: str, cuts: list[int]) -> int:
    give_freed_memory_back()
    trainer = pipeline_trainer(config, cuts, max_epochs=1)
    trainer.fit(make_net("dense"), make_loader("dense", batches=3))
    return kept_mib()


@needs_glibcs_own
def test_ranks_on_processors_keep_what_they_free() -> None:
    assert min(run(kept_after_training, 2, "1-1", [3])) > 190


@needs_glibcs_own
def test_one_device_leaves_the_memory_of_its_process_alone() -> None:
    assert run(kept_after_training, 1, "1", [], join_group=False)[0] < 10
