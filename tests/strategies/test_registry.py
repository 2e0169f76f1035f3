from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.strategies import DataParallelStrategy, PipelineStrategy, RankEnvironment


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sparsepipe_dp", DataParallelStrategy), ("sparsepipe_async", PipelineStrategy)],
)
def test_registered_by_name(name: str, kind: type) -> None:
    trainer = pl.Trainer(
        strategy=name, accelerator="cpu", devices=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    assert isinstance(trainer.strategy, kind)
    assert trainer.world_size == 2


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
