"""Loaders as people write them, and trainings of them that are stopped, killed and resumed."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import default_collate

from sparsepipe.callbacks import Resume, RunCheckpoint, StopOnSignal, TrainingReads
from sparsepipe.callbacks.checkpoint import STATE_KEY
from sparsepipe.runs.checkpoints import DirectCheckpointIO, read_checkpoint
from sparsepipe.runs.randomness import seed_epoch, seed_model
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.strategies import (
    DataParallelStrategy,
    PipelineStrategy,
    SynchronousPipelineStrategy,
)
from sparsepipe.tasks.loaders import adapt_loaders
from tests.support.pipeline_cases import QUIET

SIZE, BATCH, EPOCHS, SEED = 56, 4, 3, 5
BATCHES = SIZE // BATCH
STOP, CRASH = BATCHES + 3, 2 * BATCHES + 4
"""Steps in the middle of the second and of the third epoch."""


class Noisy(Dataset[Any]):
    """Vectors with noise from every kind of generator."""

    def __init__(self) -> None:
        self.x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.random() + np.random.rand() + self.own.random()  # noqa: NPY002
        return self.x[index] + 0.1 * drawn + 0.1 * torch.rand(6)


class Fetching(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        noise = torch.rand(len(indices))
        return [self.x[i] + 0.1 * n for i, n in zip(indices, noise, strict=True)]


class PlainSampler:
    """It has nothing but what an iterable with a length must have."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SIZE).tolist())  # noqa: NPY002

    def __len__(self) -> int:
        return SIZE


class Buckets(Sampler[list[int]]):
    """Batches without a sampler within; drawn one by one."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(SIZE))
        while left:
            yield [left.pop(random.randrange(len(left))) for _ in range(BATCH)]

    def __len__(self) -> int:
        return BATCHES


class EpochBatches(Buckets):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(100 + self.epoch)
        return iter(torch.randperm(SIZE, generator=draw).view(-1, BATCH).tolist())


class Counting(Buckets):
    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.count += 1
        draw = torch.Generator().manual_seed(self.count)
        return iter(torch.randperm(SIZE, generator=draw).view(-1, BATCH).tolist())


class Private(Buckets):
    def __init__(self) -> None:
        self.draw = np.random.default_rng(8)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.draw.permutation(SIZE).reshape(-1, BATCH).tolist())


class Hidden(Buckets):
    """Its order depends on how often it was drawn in this process, which nobody can know."""

    def __init__(self) -> None:
        self.drawn = [0]

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn.append(len(self.drawn))
        draw = torch.Generator().manual_seed(len(self.drawn))
        return iter(torch.randperm(SIZE, generator=draw).view(-1, BATCH).tolist())


class Stream(IterableDataset[Any]):
    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = range(SIZE) if worker else torch.randperm(SIZE).tolist()
        return (self.data[i] for i in order[first::step])


class OwnLoader:
    """Somebody's loader, a class of its own."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.dataset = data

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for indices in torch.randperm(SIZE).view(-1, BATCH).tolist():
            yield torch.stack([self.dataset[i] for i in indices])


class StatefulLoader(OwnLoader):
    """It continues where it was; its order is of its own epoch."""

    def __init__(self, data: Dataset[Any]) -> None:
        super().__init__(data)
        self.epoch, self.done = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]

    def __iter__(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(SIZE, generator=draw).view(-1, BATCH).tolist()
        while self.done < BATCHES:
            self.done += 1
            yield torch.stack([self.dataset[i] for i in order[self.done - 1]])
        self.epoch, self.done = self.epoch + 1, 0


class UnsizedStatefulLoader(StatefulLoader):
    """Lightning reads it one batch ahead."""

    __len__ = None  # type: ignore[assignment]


class LateStateLoader(DataLoader[Any]):
    """As torchdata's: the next iterator takes up the state, and its sampler's generator with it."""

    def __init__(self, data: Dataset[Any], batch_size: int) -> None:
        sampler = RandomSampler(data, generator=torch.Generator())  # type: ignore[arg-type]
        super().__init__(data, sampler=sampler, batch_size=batch_size)
        self.loaded: dict[str, Any] | None = None
        self.draws = sampler.generator
        self.begun, self.done = self.draws.get_state(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.begun, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def _get_iterator(self) -> Any:
        state, self.loaded = self.loaded or {"done": 0}, None
        self.draws.set_state(state.get("generator", self.draws.get_state()))
        self.begun, self.done = self.draws.get_state(), state["done"]
        iterator = super()._get_iterator()
        for _ in range(self.done):
            next(iterator)
        return iterator

    def __iter__(self) -> Any:
        iterator = self._get_iterator()
        if self.done == len(self):
            iterator = self._get_iterator()
        return self._counted(iterator)

    def _counted(self, iterator: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in iterator:
            self.done += 1
            yield batch


class Clean(Dataset[Any]):
    """Without noise, which no loader but torch's own draws by batch in its workers."""

    def __init__(self) -> None:
        self.x = Noisy().x

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class ResumedStream(IterableDataset[Any]):
    """As torchdata's pages have one: each worker keeps its place in its share."""

    def __init__(self) -> None:
        self.data, self.done, self.epoch = Clean(), 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        draw = torch.Generator().manual_seed(self.epoch)
        share = torch.randperm(SIZE, generator=draw).tolist()[first::step]
        while self.done < len(share):
            self.done += 1
            yield self.data[share[self.done - 1]]
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done, self.epoch = state["done"], state["epoch"]


def torchdata(data: Dataset[Any], **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, **options)


class Repeating:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class ReusedIterator(DataLoader[Any]):
    """As timm's and ultralytics' loaders: one iterator for all epochs, made before the first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


def mixed_up(items: list[Tensor]) -> Tensor:
    batch = default_collate(items)
    return batch + np.random.beta(1, 1) * batch[torch.randperm(len(batch))]  # noqa: NPY002


def make_loader(kind: str, workers: int, share: dict[str, int]) -> Any:
    """A loader of one kind, for the ranks that ``share`` names."""
    data = Noisy()
    more: dict[str, Any] = {"num_workers": workers}
    if workers:
        more["multiprocessing_context"] = "fork"
    sized = {**more, "batch_size": BATCH}
    makers: dict[str, Callable[[], Any]] = {
        "shared": lambda: DataLoader(data, sampler=DistributedSampler(data, **share), **sized),
        "shuffled": lambda: DataLoader(data, shuffle=True, **sized),
        "weighted": lambda: DataLoader(
            data, sampler=WeightedRandomSampler(torch.rand(SIZE), SIZE), **sized
        ),
        "subset": lambda: DataLoader(data, sampler=SubsetRandomSampler(range(SIZE)), **sized),
        "plain": lambda: DataLoader(data, sampler=PlainSampler(), **sized),  # type: ignore[arg-type]
        "within": lambda: DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=False), **more
        ),
        "buckets": lambda: DataLoader(data, batch_sampler=Buckets(), **more),
        "epochs": lambda: DataLoader(data, batch_sampler=EpochBatches(), **more),
        "counting": lambda: DataLoader(data, batch_sampler=Counting(), **more),
        "private": lambda: DataLoader(data, batch_sampler=Private(), **more),
        "single": lambda: DataLoader(
            [data.x[i : i + 4] for i in range(SIZE // 4)],  # type: ignore[arg-type]
            sampler=torch.randperm(SIZE // 4).tolist(),
            batch_size=None,
            **more,
        ),
        "fetching": lambda: DataLoader(Fetching(), shuffle=True, **sized),
        "collating": lambda: DataLoader(data, shuffle=True, collate_fn=mixed_up, **sized),
        "persistent": lambda: DataLoader(
            data, batch_sampler=Buckets(), persistent_workers=workers > 0, **more
        ),
        "beside": lambda: {
            "long": DataLoader(data, batch_sampler=Buckets(), **more),
            "short": DataLoader(Subset(Noisy(), range(5 * BATCH)), shuffle=True, **sized),
        },
        "state": lambda: StatefulLoader(data),
        "unsized": lambda: UnsizedStatefulLoader(data),
        "stream": lambda: DataLoader(Stream(data), **sized),
        "class": lambda: OwnLoader(data),
        "hidden": lambda: DataLoader(data, batch_sampler=Hidden(), **more),
        "late": lambda: LateStateLoader(data, BATCH),
        "torchdata": lambda: torchdata(Clean() if workers else data, shuffle=True, **sized),
        "torchdata-stream": lambda: torchdata(ResumedStream(), **sized),
        "reused": lambda: ReusedIterator(data, shuffle=True, **sized),
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
            batch = torch.cat([batch["long"], batch["short"]])
        noise = np.random.rand()  # noqa: NPY002  # as mixup does
        return (self.layers(batch) + noise).square().mean()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.augments or isinstance(batch, dict):
            return batch
        return batch + torch.rand(())  # augmentation on the device

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Watch:
    """As :class:`SignalWatch`, with signals of our own."""

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
        assert STATE_KEY == "RunCheckpoint"
    adapt_loaders(data, seed=SEED)
    watch = Watch()
    reads = TrainingReads(SEED, place=place)
    checkpoint = RunCheckpoint(run, monitor=None, mode="max", resume=place, reads=reads)
    log = Log(watch, end)
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True},  # type: ignore[arg-type]
        **options,
        max_epochs=EPOCHS,
        devices=1 if strategy == "single" else 2,
        strategy=STRATEGIES[strategy](),
        use_distributed_sampler=False,
        plugins=[DirectCheckpointIO()],
        callbacks=[reads, log, StopOnSignal(watch, checkpoint), checkpoint],  # type: ignore[arg-type]
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
