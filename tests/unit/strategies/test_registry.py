from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import (
    DataParallelStrategy,
    PipelineStrategy,
    RankEnvironment,
    SynchronousPipelineStrategy,
)
from sparsepipe.strategies.distributed import check_ranks


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sparsepipe_dp", DataParallelStrategy),
        ("sparsepipe_async", PipelineStrategy),
        ("sparsepipe_gpipe", SynchronousPipelineStrategy),
        ("sparsepipe_1f1b", SynchronousPipelineStrategy),
        ("sparsepipe_eager_1f1b", SynchronousPipelineStrategy),
    ],
)
def test_registered_by_name(name: str, kind: type) -> None:
    trainer = pl.Trainer(
        strategy=name, accelerator="cpu", devices=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    assert isinstance(trainer.strategy, kind)
    assert trainer.world_size == 2
    if isinstance(trainer.strategy, SynchronousPipelineStrategy):
        assert trainer.strategy.schedule == name.removeprefix("sparsepipe_")


def test_environment_takes_ranks_as_the_agent_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second of two hosts, the first of which runs three ranks.
    for name, value in {
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "GROUP_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    environment = RankEnvironment()
    assert environment.creates_processes_externally
    environment.set_world_size(4)
    environment.set_global_rank(3)  # what Lightning computes from equal counts
    assert (environment.world_size(), environment.global_rank()) == (5, 4)
    assert (environment.local_rank(), environment.node_rank()) == (1, 1)


def test_mean_of_counts_keeps_the_fraction() -> None:
    count = torch.tensor(9)
    assert DataParallelStrategy().reduce(count, reduce_op="mean").is_floating_point()
    assert not DataParallelStrategy().reduce(count, reduce_op="sum").is_floating_point()


def test_hosts_may_have_unequal_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = RankEnvironment()
    for name, value in {
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    check_ranks(environment, nodes=2, devices=2)
    for nodes, devices in ((2, 3), (3, 2), (1, 2)):
        with pytest.raises(ConfigError, match="but 5 ranks run"):
            check_ranks(environment, nodes=nodes, devices=devices)
    check_ranks(environment, nodes=1, devices=5)
