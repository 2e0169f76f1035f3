"""What of a search, of profiles and of a training makes a run another one, and what follows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsepipe import __version__
from sparsepipe.cluster import Link
from sparsepipe.config.build import build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Measuring
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.planning.measuring import link_spec, profile_spec
from sparsepipe.planning.search import memory_model
from sparsepipe.tasks.task import task_of
from sparsepipe.utils.host import cpu_name, usable_cores
from tests.support.command_line import composed
from tests.support.planned_cases import MODEL, SLOW, TWO, given, profile
from tests.support.resolved import resolved, run_directory

pytestmark = pytest.mark.usefixtures("workplace", "networks_for_ranks")


def measuring(*settings: str, how: Measuring | None = None) -> RunSpec:
    """A configuration that measures the first device that there is."""
    config = composed(*MODEL, *settings)
    device = build_inventory(config).hosts[0].devices[0].name
    return profile_spec(config, device, how or Measuring())


def test_the_identity_of_a_profile_has_the_settings_it_depends_on() -> None:
    def identity(*settings: str, how: Measuring | None = None) -> str:
        wanted = measuring(*TWO, *settings, how=how)
        return run_directory(wanted).run_id

    base = identity("parallel=hete_mp")
    other = ("seed=3", "optim.optimizer.lr=0.5", "trainer.max_epochs=9", "name=other", "force=true")
    assert identity("parallel=exact", SLOW, *other, "logger=wandb") == base
    assert identity("parallel=hete_mp", "data.batch_size=8") != base
    assert identity("parallel=hete_mp", "optim=adamw") != base, "its update takes longer"
    assert identity("parallel=hete_mp", "model.width=32") != base
    assert identity("parallel=hete_mp", "hardware.cpu_devices=3") != base
    assert identity("parallel=hete_mp", how=Measuring(num_measured=7)) != base


def test_a_seed_is_none_of_a_profile() -> None:
    """Nor is that of the house's own data, which is the run's."""

    def identity(*settings: str) -> dict[str, Any]:
        config = composed("data=shapes", "parallel=hete_mp", *settings)
        return profile_spec(config, "core", Measuring()).identity()

    assert composed("data=shapes", "seed=3").data.get("seed") == 3
    assert identity("seed=3") == identity()
    assert identity("data.seed=3") == identity()
    assert identity("data.source.seed=3") != identity()


def test_a_profile_belongs_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the inventory calls its devices by other names than the vendor."""
    wanted = measuring("hardware=two_speeds")
    inventory = build_inventory(wanted)
    told = task_of(wanted).prepare(resolved(wanted, inventory))
    versions = f"torch {torch.__version__}", f"sparsepipe {__version__}"
    assert all(word in told for word in (cpu_name(), *versions))
    cores = max(1, usable_cores() // 2)
    ids = {}
    for threads in (str(cores), str(cores + 1), None):
        if threads is None:
            monkeypatch.delenv("OMP_NUM_THREADS")
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        ids[threads] = run_directory(wanted, inventory).run_id
    assert ids[None] == ids[str(cores)] != ids[str(cores + 1)]


def test_links_are_none_of_a_profile() -> None:
    wanted = measuring("hardware=two_speeds")
    without = build_inventory(wanted)
    fast = Link(bytes_per_s=1e9)
    linked = replace(without, hosts=(replace(without.hosts[0], link=fast),), link=fast)
    assert run_directory(wanted, linked).run_id == run_directory(wanted, without).run_id
    training = composed(*MODEL, "hardware=two_speeds")
    assert run_directory(training, linked).run_id != run_directory(training, without).run_id


def test_a_link_belongs_to_the_machine_and_not_to_what_is_trained() -> None:
    def identity(*settings: str) -> str:
        config = link_spec(composed(*MODEL, *TWO, "parallel=hete_mp", *settings))
        inventory = build_inventory(config)
        config = task_of(config).configured(config, inventory)
        return run_directory(config, inventory).run_id

    base = identity()
    other = ("model.width=32", "data.batch_size=4", "optim=adamw", "seed=1", "parallel=exact")
    assert identity(*other, "trainer.max_epochs=9", "name=other", "force=true") == base
    assert identity("hardware.cpu_devices=3") != base
    assert identity("parallel.strategy.direct=true") != base
    config = link_spec(composed(*MODEL, *TWO, "parallel=hete_mp"))
    inventory = build_inventory(config)
    told = task_of(config).prepare(resolved(task_of(config).configured(config, inventory)))
    words = (inventory.hosts[0].name, cpu_name(), f"torch {torch.__version__}")
    assert all(word in told for word in words)


def test_given_profiles_are_identified_by_their_content(tmp_path: Path) -> None:
    def identity(*settings: str) -> str:
        config = composed(*MODEL, *TWO, "parallel=hete_mp", SLOW, *settings)
        return run_directory(config).run_id

    base = identity(given(tmp_path, profile([1, 1, 1, 1])))
    assert identity(given(tmp_path, profile([1, 1, 1, 1]), "elsewhere.json")) == base
    assert identity(given(tmp_path, profile([1, 1, 1, 2]))) != base
    assert identity() != base
    same = given(tmp_path, profile([1, 1, 1, 1]))
    assert identity(same, "parallel.search.reserved_bytes=1") != base
    assert identity(same, "parallel.devices=2") == base


def test_memory_follows_the_training() -> None:
    def room(*settings: str) -> tuple[bool, float] | None:
        model = model_of(*settings)
        return None if model is None else (model.stash, model.optimizer)

    def model_of(*settings: str) -> MemoryModel | None:
        config = composed(*MODEL, "parallel=hete_mp", *settings)
        choice = config.search
        assert choice is not None
        return memory_model(choice, config)

    assert room() == (True, 1.0)
    assert room("parallel.strategy.mode=none", "optim=adamw") == (False, 2.0)
    assert room("optim.optimizer.momentum=0") == (True, 0.0)
    assert room("parallel.search.stash=false", "parallel.search.optimizer_bytes=5") == (False, 5.0)
    assert room("parallel.search.memory=false") is None
    predicted = [model_of(), model_of("parallel.strategy.mode=spectrain")]
    assert [None if model is None else model.predicted for model in predicted] == [False, True]


def test_synchronous_schedules_and_their_microbatches_make_another_run() -> None:
    def identity(*settings: str) -> str:
        config = composed(*MODEL, *TWO, "data.batch_size=4", "parallel.plan.config=1-1", *settings)
        return run_directory(config).run_id

    every = [
        identity("parallel=pipeline"),
        identity("parallel=gpipe"),
        identity("parallel=sync_1f1b"),
        identity("parallel=gpipe", "parallel.strategy.microbatches=2"),
    ]
    assert len({*every}) == 4
    assert identity("parallel=gpipe", "parallel.strategy.timeout_s=9") == every[1]
