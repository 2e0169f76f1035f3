"""The house's own data and networks through the tasks, as small as they come."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.config.compose import config_dir
from sparsepipe.errors import ConfigError
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.utils.files import read_json
from tests.support.command_line import fault, rows, weights

TINY = (
    "experiment=demo",
    "parallel=single",
    "parallel.devices=1",
    "data.source.classes=[mug,wheel]",
    "data.source.train_per_class=4",
    "data.source.test_per_class=2",
    "data.val_share=0.25",
    "data.cached_points=512",
    "data.num_points=256",
    "data.resolution=8",
    "data.batch_size=3",
    "data.cache_workers=1",
    "model.width=0.0625",
    "trainer.max_epochs=2",
    "task.gallery=4",
)


@pytest.mark.parametrize(
    "network",
    [
        ("model=sparse_vgg11_bn",),
        pytest.param(
            ("model=dense_vgg11_bn", "trainer.precision=bf16-mixed"), marks=pytest.mark.full
        ),
        pytest.param(("model=sparse_resnet18",), marks=pytest.mark.full),
    ],
    ids=["sparse", "dense", "residual"],
)
def test_train_and_evaluate(job: Callable[..., Path], network: tuple[str, ...]) -> None:
    run = job(*TINY, *network)
    assert (run / "predictions.png").stat().st_size > 1_000
    assert [row["epoch"] for row in rows(run)] == ["0", "1"]
    evaluated = job(*TINY, *network, "task=evaluate", "task.timed_batches=2", f"checkpoint={run}")
    results = [read_json(path / "result.json") for path in (run, evaluated)]
    assert results[0]["test/accuracy"] == results[1]["test/accuracy"]
    assert results[1]["inference_shapes_per_s"] > 0
    assert (evaluated / "predictions.png").exists()


@pytest.mark.parametrize(("model", "given"), [("sparse", "dense"), ("dense", "sparse")])
def test_networks_refuse_the_other_representation(
    job: Callable[..., Path], model: str, given: str
) -> None:
    with pytest.raises(ConfigError) as error:
        job(*TINY, f"model={model}_vgg11_bn", f"data.representation={given}")
    assert "data.representation=" in error.value.remedy


def test_data_of_a_single_class(job: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="num_classes=1 leaves nothing"):
        job(*TINY, "data.source.classes=[mug]")


@pytest.mark.parametrize(("share", "shapes"), [(0.0, 4), (0.25, 2)], ids=["test", "validation"])
def test_more_ranks_than_shapes_are_refused_before_training(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, share: float, shapes: int
) -> None:
    """As one of five ranks would see it."""
    kwargs = {"num_replicas": 5, "rank": 0}
    monkeypatch.setattr(pl.Trainer, "distributed_sampler_kwargs", kwargs)
    more = "data.source.test_per_class=3" if share else "data.source.test_per_class=2"
    with pytest.raises(ConfigError, match=f"but has {shapes} for 5 ranks"):
        job(*TINY, f"data.val_share={share}", more, "trainer.check_val_every_n_epoch=2")
    assert not list(Path("outputs").rglob("metrics.csv"))


@pytest.mark.full
@pytest.mark.parametrize("step", [4, 5], ids=["within an epoch", "at an epoch's end"])
def test_neither_going_on_nor_loader_workers_change_anything(
    job: Callable[..., Path], step: int
) -> None:
    """Three steps an epoch, with dropout: the masks must be the same in all runs."""
    small = (*TINY, "model.dropout=0.5", "data.batch_size=2", "trainer.max_epochs=3")
    expected = weights(job(*small, "name=undisturbed", "data.num_workers=0"))
    for workers in (0, 1):
        faulty = (*small, f"name=workers{workers}", f"data.num_workers={workers}",
                  fault([(step, signal.SIGINT)]))  # fmt: skip
        with contextlib.suppress(Stopped):
            job(*faulty)
        assert torch.equal(weights(job(*faulty)), expected)
        Path(f"fault-at-{step}").unlink()


def test_experiments_name_their_directory() -> None:
    for path in (config_dir() / "experiment").glob("*.yaml"):
        assert f"\nname: {path.stem}\n" in path.read_text()
