"""Spatial parallelism from the command line, and on volumes that ranks read in parts."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepipe.data import GeneratedVolumes, VolumeDataModule
from sparsepipe.errors import ConfigError
from sparsepipe.strategies import SpatialStrategy
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, fault, orphans, rows, weights
from tests.support.fault_cases import BLAMED, LEAVING_S, PATIENCE_S, assert_same, ended_s
from tests.support.pipeline_cases import QUIET
from tests.support.processes import run_shared
from tests.support.spatial_house import IMAGES, SPATIAL

Job = Callable[..., Path]
LIMIT_S = 20
FAULTS = (*SPATIAL, f"parallel.strategy.timeout_s={LIMIT_S}")
SINGLE = (*IMAGES, "parallel=single", "parallel.devices=1")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    return Shell(tmp_path_factory.mktemp("undisturbed"))(*FAULTS).run


def assert_alike(run: Path, alone: Path) -> None:
    """Weights and figures of two runs within rounding in single precision."""
    torch.testing.assert_close(weights(run), weights(alone), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(rows(run), rows(alone), strict=True):
        for name in ("train/loss", "train/accuracy", "val/loss", "val/accuracy"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-4), name


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_equals_one_process(job: Job) -> None:
    run, alone = job(*SPATIAL, "trainer.max_epochs=1"), job(*SINGLE, "trainer.max_epochs=1")
    assert_alike(run, alone)
    assert read_json(run / "result.json")["ranks"] == 2


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_checkpoints_are_those_of_one_process(job: Job) -> None:
    """Each evaluates and goes on with the other's."""
    of_shards, alone = job(*SPATIAL), job(*SINGLE)
    for run, elsewhere in ((of_shards, SINGLE), (alone, SPATIAL)):
        how = [each for each in elsewhere if each.startswith(("parallel", "hardware"))]
        evaluated = job("task=evaluate", f"checkpoint={run}", *how)
        for name in ("test/accuracy", "test/loss"):
            value = read_json(run / "result.json")[name]
            assert read_json(evaluated / "result.json")[name] == pytest.approx(value, rel=1e-4)
    further = [
        job(*how, f"checkpoint={run}", "model.dropout=0", "name=further")
        for how, run in ((SINGLE, of_shards), (SPATIAL, of_shards))
    ]
    assert_alike(further[1], further[0])


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_replicas_of_a_grid_equal_data_parallelism(job: Job) -> None:
    settings = (*IMAGES, "data.batch_size=2", "model.dropout=0")
    grids = job(
        *(*settings, "parallel=spatial", "parallel.devices=4"),
        *("parallel.grid=[2,1]", "parallel.replicas=2"),
    )
    assert_alike(grids, job(*settings, "parallel=dp", "parallel.devices=2"))


def injected(place: str, signum: int, *, epoch: int = 1, count: int = 2) -> str:
    node = (
        "_target_: tests.support.tinyfaults.Injection, "
        f"rank: 1, place: {place}, signum: {int(signum)}, epoch: {epoch}, count: {count}"
    )
    return f"callbacks={{fault: {{{node}}}}}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "signum", "text"),
    [
        ("exchange", signal.SIGKILL, r"rank 1 was killed by SIGKILL|rank 1 is gone"),
        ("update", signal.SIGKILL, r"rank 1 was killed by SIGKILL|rank 1 is gone"),
        ("validation", signal.SIGKILL, r"rank 1 was killed by SIGKILL|rank 1 is gone"),
        ("checkpoint", signal.SIGKILL, r"rank 1 was killed by SIGKILL|rank 1 is gone"),
        ("exchange", signal.SIGSTOP, r"rank 1 did not (answer|take part)"),
        ("exchange", 0, r"rank 1 raised ValueError: somebody's own mistake"),
        ("batch", 0, r"rank 1 raised ValueError: somebody's own mistake"),
    ],
)
def test_a_rank_that_fails_ends_all_and_the_run_goes_on(
    shell: Shell, expected: Path, place: str, signum: int, text: str
) -> None:
    # A checkpoint is put together once an epoch, and validation has two batches.
    count = {"checkpoint": 0, "validation": 1}.get(place, 2)
    faulty = (*FAULTS, injected(place, signum, count=count))
    failed = shell(*faulty, timeout_s=180)
    assert (shell.cwd / "injected").exists(), "the fault did not come about"
    assert ended_s(shell.cwd) < LIMIT_S + PATIENCE_S + LEAVING_S
    assert not orphans(shell.cwd)
    assert failed.code > 0
    assert failed.err.count("error: ") == failed.err.count("remedy:") == 1, failed.err
    assert re.search(text, failed.err[failed.err.index("error: ") :]), failed.err
    assert_same(shell(*faulty).run, expected)


@pytest.mark.full
def test_ranks_begin_again_by_themselves(shell: Shell, expected: Path) -> None:
    again = shell(*FAULTS, injected("exchange", signal.SIGKILL), "parallel.max_restarts=1")
    assert (shell.cwd / "injected").exists()
    assert "restart 1 of 1" in again.err
    assert "rank 1" in again.err
    assert_same(again.run, expected)


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_within_its_epoch(
    shell: Shell, expected: Path, signum: signal.Signals
) -> None:
    faulty = (*FAULTS, fault([(8, signum)], parent=True))
    stopped = shell(*faulty)
    assert stopped.code == 128 + signum, stopped.err
    assert "run the same command again" in stopped.err
    assert "Traceback" not in stopped.err
    (run,) = shell.runs()
    place = checkpoint(run)["callbacks"]["RunCheckpoint"]
    assert (place["epoch"], place["batches"]) == (1, 3), "six batches in an epoch"
    assert_same(shell(*faulty).run, expected)


@pytest.mark.full
def test_a_rank_killed_under_torchrun_is_named(shell: Shell, expected: Path) -> None:
    failed = shell.torchrun(2, *FAULTS, injected("exchange", signal.SIGKILL))
    assert failed.returncode
    assert ended_s(shell.cwd) < LIMIT_S + 30 + LEAVING_S  # torchrun's own patience
    named = rf"error: .*?rank 1 {BLAMED}.* moving halos between shards"
    assert re.search(named, failed.stderr), failed.stderr
    assert_same(shell(*FAULTS, injected("exchange", signal.SIGKILL)).run, expected)


def test_a_grid_that_does_not_match_the_ranks_is_refused_before_they_start(job: Job) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*SPATIAL, "parallel.grid=[2,2]")
    assert "a grid of 2 x 2 with replicas=1 does not fit the number" in caught.value.message
    assert caught.value.remedy


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            ("parallel.grid=[1,2]", "data.source.sizes=[24,1]", "model.levels=1"),
            "a sample of size 1 in spatial dimension 1 cannot be cut into 2 shards",
        ),
        (
            ("model._target_=tests.support.spatial_house.spectral",),
            "fft_fft has no rule for a sample that is cut into shards (called by Spectral.forward)",
        ),
    ],
    ids=["sizes", "function"],
)
def test_what_cannot_be_cut_is_refused(shell: Shell, settings: tuple[str, ...], text: str) -> None:
    refused = shell(*SPATIAL, *settings, timeout_s=120)
    assert refused.code == 2, refused.err
    assert text in refused.err
    assert refused.err.count("error: ") == refused.err.count("remedy:") == 1, refused.err
    assert "Traceback" not in refused.err


SIZES = (10, 9, 14)


class Net(pl.LightningModule):
    """Classes of voxels, or of the whole."""

    def __init__(self, labels: str) -> None:
        super().__init__()
        self.labels = labels
        self.layers = nn.Sequential(
            *(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU()),
            nn.Conv3d(4, 5, 3, padding=1),
        )
        self.losses: list[float] = []
        self.read: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found if self.labels == "voxel" else found.mean((2, 3, 4))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        dataset = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        self.read.add(tuple(dataset[0, 0]["input"].shape))
        loss = F.cross_entropy(self(batch["input"]), batch["label"])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch["input"]), batch["label"])
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trained(rank: int, cache: Path, labels: str, ranks: int) -> dict[str, Any]:
    torch.manual_seed(3)
    net = Net(labels)
    data = VolumeDataModule(
        source=functools.partial(GeneratedVolumes, sizes=SIZES, train_samples=8, test_samples=2),
        cache_dir=cache,
        labels=labels,  # type: ignore[arg-type]
        batch_size=2,
        num_workers=0,
        val_share=0.25,
    )
    strategy: Any = "auto" if ranks == 1 else SpatialStrategy(grid="auto")
    trainer = pl.Trainer(
        **QUIET, max_epochs=2, devices=ranks, strategy=strategy, use_distributed_sampler=False
    )
    trainer.fit(net, datamodule=data)
    return {
        "weights": net.layers.state_dict(),
        "losses": net.losses,
        "val": float(trainer.callback_metrics["val"]),
        "read": net.read,
    }


@pytest.mark.parametrize("labels", ["sample", "voxel"])
def test_a_training_on_parts_equals_one_process(tmp_path: Path, labels: str) -> None:
    (expected,) = run_shared(trained, 1, tmp_path, labels, 1)
    assert expected["read"] == {(1, *SIZES)}
    for found in run_shared(trained, 2, tmp_path, labels, 2):
        assert found["read"] == {(1, 10, 9, 7)}, "the grid is along the longest dimension"
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-4)
        for name, value in found["weights"].items():
            assert torch.allclose(value, expected["weights"][name], rtol=1e-4, atol=1e-5), name
