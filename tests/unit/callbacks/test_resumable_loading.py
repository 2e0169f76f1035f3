"""A resumed training reads what an undisturbed one would have read."""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

from sparsepipe.callbacks import ResumableLoaders, Resume, RunCheckpoint, StopOnSignal
from sparsepipe.runs.checkpoints import DirectCheckpointIO, read_checkpoint
from sparsepipe.runs.randomness import adapt_loaders, seed_epoch, seed_model
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.strategies import (
    DataParallelStrategy,
    PipelineStrategy,
    SynchronousPipelineStrategy,
)
from tests.support.pipeline_cases import QUIET
from tests.support.processes import outcomes, run

SIZE, BATCH, EPOCHS, SEED = 56, 4, 3, 5
BATCHES = SIZE // BATCH
STOP, CRASH = BATCHES + 3, 2 * BATCHES + 4
"""Steps in the middle of the second and of the third epoch."""


class Clean(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class Noisy(Clean):
    def __getitem__(self, index: int) -> Tensor:
        drawn = random.random() + np.random.rand()  # noqa: NPY002
        return self.x[index] + 0.1 * drawn + 0.1 * torch.rand(6)


class OwnLoader:
    """Somebody's loader, a class of its own."""

    dataset = Clean()

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.dataset.x[torch.randperm(SIZE)].view(BATCHES, BATCH, 6)


class StatefulLoader(OwnLoader):
    """It continues where it was."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def __iter__(self) -> Iterator[Tensor]:
        self.done %= BATCHES
        for batch in self.dataset.x.view(BATCHES, BATCH, 6)[self.done :]:
            self.done += 1
            yield batch


class UnsizedLoader(StatefulLoader):
    """Lightning reads it one batch ahead."""

    __len__ = None  # type: ignore[assignment]


def torchdata(data: Dataset[Any], **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, **options)


def make_loader(kind: str, workers: int, share: dict[str, int]) -> Any:
    """A loader of one kind, for the ranks that ``share`` names."""
    data = Clean() if workers else Noisy()
    more: dict[str, Any] = {"num_workers": workers}
    if workers:
        more["multiprocessing_context"] = "fork"
    sized = {**more, "batch_size": BATCH}
    draws = WeightedRandomSampler(torch.rand(SIZE).tolist(), SIZE)
    makers: dict[str, Callable[[], Any]] = {
        "shared": lambda: DataLoader(data, sampler=DistributedSampler(data, **share), **sized),
        "shuffled": lambda: DataLoader(data, shuffle=True, **sized),
        "single": lambda: DataLoader(list(Clean().x.view(-1, BATCH, 6)), batch_size=None, **more),  # type: ignore[arg-type]
        "persistent": lambda: DataLoader(
            data, shuffle=True, persistent_workers=workers > 0, **sized
        ),
        "beside": lambda: {
            "first": DataLoader(data, shuffle=True, **sized),
            "second": DataLoader(Clean(), shuffle=True, **sized),
        },
        "state": StatefulLoader,
        "torchdata": lambda: torchdata(data, shuffle=True, **sized),
        "weighted": lambda: DataLoader(data, sampler=draws, **sized),
        "class": OwnLoader,
        "unsized": UnsizedLoader,
    }
    return makers[kind]()


class Loaders(pl.LightningDataModule):
    def __init__(self, kind: str, workers: int) -> None:
        super().__init__()
        self.kind, self.workers = kind, workers

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        given = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        torch.manual_seed(0)  # the weights of samplers
        return make_loader(self.kind, self.workers, given)


class Net(pl.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.augments = dropout > 0
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = torch.cat([batch["first"], batch["second"]])
        noise = np.random.rand()  # noqa: NPY002  # as mixup does
        return (self.layers(batch) + noise).square().mean()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.augments or isinstance(batch, dict):
            return batch
        return batch + torch.rand(())  # augmentation on the device

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Watch:
    signum: int | None = None
    deferred = False

    def install(self) -> None:
        pass


class Crash(Exception):
    """The process ends here, as by SIGKILL: nothing is saved."""


class Log(pl.Callback):
    """Keeps the batches that a training gets, and ends it at a step."""

    def __init__(self, watch: Watch, end: tuple[str, int] | None) -> None:
        self.read: dict[tuple[int, int], str] = {}
        self.watch, self.end = watch, end

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        leaves = batch.values() if isinstance(batch, dict) else [batch]
        text = " ".join(repr(getattr(leaf, "sum", lambda leaf=leaf: leaf)()) for leaf in leaves)
        self.read[trainer.current_epoch, batch_idx] = text
        how, step = self.end or ("", -1)
        if trainer.global_step == step:
            if how == "crash":
                raise Crash
            self.watch.signum = signal.SIGTERM


STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "dp": lambda: DataParallelStrategy(timeout_s=30),
    "asynchronous": lambda: PipelineStrategy(config="1-1", cuts=[2], timeout_s=30),
    "synchronous": lambda: SynchronousPipelineStrategy(
        schedule="1f1b", microbatches=2, config="1-1", cuts=[2], timeout_s=30
    ),
}


def train(
    directory: Path,
    kind: str,
    workers: int = 0,
    *,
    end: tuple[str, int] | None = None,
    strategy: str = "single",
    **options: Any,
) -> tuple[dict[tuple[int, int], str], dict[str, Tensor]]:
    """Trains from the directory's checkpoint, if there is one; what it read, and its weights."""
    run = RunDir(directory)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    seed_model(SEED)
    data, net = Loaders(kind, workers), Net(0.5 if strategy in ("single", "dp") else 0.0)
    place = None
    if run.last.exists():
        place = Resume.read(run.last, read_checkpoint(run.last))
    adapt_loaders(data, seed=SEED)
    watch = Watch()
    loaders = ResumableLoaders(SEED, resume=place)
    checkpoint = RunCheckpoint(run, monitor=None, mode="max", resume=place, loaders=loaders)
    log = Log(watch, end)
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True},  # type: ignore[arg-type]
        **options,
        max_epochs=EPOCHS,
        devices=1 if strategy == "single" else 2,
        strategy=STRATEGIES[strategy](),
        use_distributed_sampler=False,
        plugins=[DirectCheckpointIO()],
        callbacks=[loaders, log, StopOnSignal(watch, checkpoint), checkpoint],  # type: ignore[arg-type]
    )
    seed_epoch(SEED, 0)
    try:
        trainer.fit(
            net,
            datamodule=data,
            ckpt_path=None if place is None else str(run.last),
            weights_only=True,
        )
    except (Stopped, Crash):
        assert end is not None
    return log.read, {name: value.clone() for name, value in net.state_dict().items()}


RESUMED = ("shared", "shuffled", "single", "persistent", "beside", "state", "torchdata")
REPEATED = {
    "weighted": "the order of WeightedRandomSampler may depend on more",
    "class": "is not a plain DataLoader",
    "unsized": "has no length",
}
"""Loaders whose epoch begins again, and why."""
QUICK = ("shuffled", "persistent")
CASES = [
    *((kind, 0) for kind in RESUMED),
    *(
        pytest.param(kind, 2, marks=[] if kind in QUICK else pytest.mark.full)
        for kind in RESUMED
        if kind != "state"
    ),
]


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_a_resumed_training_is_the_undisturbed_one(kind: str, workers: int, tmp_path: Path) -> None:
    """Stopped within an epoch, then killed within the next one."""
    if kind == "torchdata":
        pytest.importorskip("torchdata.stateful_dataloader")
    expected, weights = train(tmp_path / "undisturbed", kind, workers)
    found = {}
    for end in (("stop", STOP), ("crash", CRASH), None):
        read, ours = train(tmp_path / "run", kind, workers, end=end)
        assert end == ("stop", STOP) or (1, 1) not in read
        found.update(read)
    assert found == expected
    assert all(torch.equal(ours[name], value) for name, value in weights.items())


@pytest.mark.parametrize("kind", REPEATED)
def test_other_loaders_begin_their_epoch_again(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, kind, end=("stop", STOP))
    assert "repeat epoch 2" in caplog.text
    assert REPEATED[kind] in caplog.text
    read, _ = train(tmp_path, kind)
    assert sorted(read) == [(epoch, batch) for epoch in (1, 2) for batch in range(BATCHES)]


def of_ranks(
    rank: int,
    directory: Path,
    strategy: str,
    kinds: tuple[str, ...],
    end: Any = None,
    workers: int = 0,
) -> list[Any]:
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # which have no workers
    found = [train(directory / kind, kind, workers, strategy=strategy, end=end) for kind in kinds]
    torch.save(found, directory / f"rank{rank}.pt")
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "strategy", [pytest.param("dp", marks=pytest.mark.full), "asynchronous", "synchronous"]
)
def test_ranks_read_on_where_they_were(strategy: str, workers: int, tmp_path: Path) -> None:
    kinds = ("shuffled", "persistent") if workers else ("shuffled", "beside", "state")
    expected = run(of_ranks, 2, tmp_path / "undisturbed", strategy, kinds, None, workers)
    outcomes(of_ranks, 2, tmp_path / "run", strategy, kinds, ("stop", STOP), workers)
    begun = [torch.load(tmp_path / "run" / f"rank{rank}.pt") for rank in range(2)]
    ended = run(of_ranks, 2, tmp_path / "run", strategy, kinds, None, workers)
    for firsts, rests, wholes in zip(begun, ended, expected, strict=True):
        for (first, _), (rest, ours), (whole, weights) in zip(firsts, rests, wholes, strict=True):
            assert min(rest) > (1, 1)
            assert {**first, **rest} == whole
            if strategy != "asynchronous":  # whose pipeline is emptied by a stop
                assert all(torch.equal(ours[name], value) for name, value in weights.items())


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["dp", "asynchronous", "synchronous"])
def test_killed_ranks_read_their_epoch_again(strategy: str, tmp_path: Path) -> None:
    expected = run(of_ranks, 2, tmp_path / "undisturbed", strategy, ("shuffled",))
    outcomes(of_ranks, 2, tmp_path / "run", strategy, ("shuffled",), ("crash", CRASH))
    ended = run(of_ranks, 2, tmp_path / "run", strategy, ("shuffled",))
    for [(read, ours)], [(whole, weights)] in zip(ended, expected, strict=True):
        assert min(read) == (2, 0)
        assert read.items() <= whole.items()
        assert all(torch.equal(ours[name], value) for name, value in weights.items())
