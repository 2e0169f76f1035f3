"""Somebody's own data and models, small enough for tests: vectors in two classes.

Nothing here imports the house: the command line must be able to train what others wrote.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchmetrics import MeanMetric, Metric

LONG_S = 300.0  # longer than any test waits


class Vectors(Dataset):
    def __init__(self, count: int, *, seed: int, delay_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.label = torch.arange(count) % 2
        noise = torch.randn(count, 8, generator=generator)
        self.vector = noise + self.label[:, None]
        self.delay_s = delay_s

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> dict[str, object]:
        time.sleep(self.delay_s)
        return {"input": self.vector[index], "label": self.label[index], "index": index}


class VectorData(pl.LightningDataModule):
    def __init__(
        self,
        *,
        train_size: int = 32,
        val_size: int = 8,
        test_size: int = 9,
        batch_size: int = 4,
        delay_s: float = 0.0,
        num_workers: int = 0,
        version: int = 0,
        prepare_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.batch_size, self.delay_s, self.num_workers = batch_size, delay_s, num_workers
        self.prepare_s = prepare_s
        self.classes, self.num_classes = ("down", "up"), 2

    def prepare_data(self) -> None:
        mark = Path("prepared")
        if self.prepare_s and not mark.exists():
            time.sleep(self.prepare_s)
            mark.touch()

    def fingerprint(self) -> str:
        return "vectors"

    def _loader(self, split: str, seed: int) -> DataLoader | list[DataLoader]:
        if not self.sizes[split]:
            return []
        dataset = Vectors(
            self.sizes[split], seed=seed, delay_s=self.delay_s if split == "train" else 0.0
        )
        kwargs = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {}
        ranks = {"num_replicas": kwargs.get("num_replicas", 1), "rank": kwargs.get("rank", 0)}
        # For evaluation without padding: ranks get unequal numbers of batches.
        sampler = (
            DistributedSampler(dataset, **ranks)
            if split == "train"
            else range(ranks["rank"], len(dataset), ranks["num_replicas"])
        )
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            multiprocessing_context="fork" if self.num_workers else None,
        )

    def train_dataloader(self):
        return self._loader("train", 1)

    def val_dataloader(self):
        return self._loader("val", 2)

    def test_dataloader(self):
        return self._loader("test", 3)


class Stream(IterableDataset):
    """Shapes one after the other, of which nobody knows how many there are."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def __iter__(self):
        return (self.vectors[index] for index in range(len(self.vectors)))


class StreamedData(VectorData):
    """Data to train on that do not tell how many they are."""

    def train_dataloader(self):
        stream = Stream(Vectors(self.sizes["train"], seed=1))
        return DataLoader(stream, batch_size=self.batch_size)


class SharedData(VectorData):
    """Data that read their rank's share, as Lightning has it: they know their trainer by then."""

    def _loader(self, split: str, seed: int) -> DataLoader | list[DataLoader]:
        assert self.trainer is not None
        return super()._loader(split, seed)


class AnonymousData(VectorData):
    """Data somewhere on the disk that cannot tell their fingerprint."""

    fingerprint = None

    def __init__(self, *, root: str, **settings) -> None:
        super().__init__(**settings)
        self.root = root


def mlp(*, num_classes: int, width: int = 8, dropout: float = 0.0, norm: bool = False):
    """Layers for the house's classifier."""
    norms = [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(
        nn.Linear(8, width), *norms, nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, num_classes)
    )


def noting_mlp(*, num_classes: int, width: int, dropout: float, norm: bool):
    """Notes in the file ``$MULTIPLYING`` how a process multiplies, whenever it computes."""
    network = mlp(num_classes=num_classes, width=width, dropout=dropout, norm=norm)
    network[0].register_forward_hook(_note_precision)
    return network


def _note_precision(*_):
    words = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with Path(os.environ["MULTIPLYING"]).open("a") as notes:
        print(os.getpid(), *words, file=notes)


class Hearing:
    """Notes that a signal has come to this process, which heeds it as before."""

    def __init__(self, signum: int, mark: Path | None = None) -> None:
        self.heard = False
        self._heed, self._mark = signal.getsignal(signum), mark
        signal.signal(signum, self._note)

    def _note(self, signum, frame):
        self._heed(signum, frame)
        self.heard = True
        if self._mark is not None:
            self._mark.touch()


class Fault(pl.Callback):
    """Does something to a process when a step begins, each once in a directory's life.

    Args:
        plan: pairs of a step and a signal; signal 0 raises an exception instead.
        rank: which rank it happens to.
        parent: the signal goes to the launching process; this one goes on when it has been
            passed on to it, so that the step is the one of the plan however slow that is.
    """

    def __init__(self, *, plan: list[list[int]], rank: int = 0, parent: bool = False) -> None:
        self.plan, self.rank, self.parent = dict(plan), rank, parent

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        signum = self.plan.get(trainer.global_step)
        mark = Path(f"fault-at-{trainer.global_step}")
        if trainer.global_rank != self.rank or signum is None or mark.exists():
            return None
        mark.touch()
        if signum == 0:
            raise ValueError("somebody's own mistake")
        if not self.parent:
            return os.kill(os.getpid(), signum)
        passed_on = None if signum == signal.SIGKILL else Hearing(signum)
        os.kill(os.getppid(), signum)
        while passed_on is None or not passed_on.heard:
            time.sleep(0.01)  # where the parent is killed, for the end that follows
        return None


class StopTest(pl.Callback):
    """Interrupts the test, once in a task's life."""

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        mark = Path(trainer.default_root_dir) / "checkpoints" / "test-was-stopped"
        if not mark.exists():
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
            os.kill(os.getpid(), signal.SIGINT)


class LongTest(pl.Callback):
    """A test that takes minutes the first time and says when it has begun."""

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        mark = Path("in-test")
        if not mark.exists():
            mark.touch()
            time.sleep(LONG_S)


class LongStep(pl.Callback):
    """A step that takes minutes; says when it has begun and when Ctrl-C has come."""

    def __init__(self, *, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            Hearing(signal.SIGINT, Path(f"heard-{trainer.global_rank}"))
            Path(f"in-step-{trainer.global_rank}").touch()
            time.sleep(LONG_S)


class SaveWeights(pl.Callback):
    """Leaves each rank's parameters and buffers behind."""

    def on_train_end(self, trainer, pl_module):
        torch.save(pl_module.layers.state_dict(), f"rank{trainer.global_rank}.pt")


class Nodes(pl.Callback):
    """Leaves behind on which node each rank is, as its launcher numbers them, and its layers."""

    def on_train_start(self, trainer, pl_module):
        held = [name for name, module in pl_module.layers.named_children()
                if any(True for _ in module.parameters())]  # fmt: skip
        node = os.environ["GROUP_RANK"]
        Path(f"rank{trainer.global_rank}").write_text(f"node {node}, layers {', '.join(held)}")


class Speeds(pl.Callback):
    """Leaves behind how many times slower each rank's device is made; 1 where nothing does."""

    def on_train_start(self, trainer, pl_module):
        slowdown = getattr(trainer.strategy, "slowdown", None)
        slowdown = 1.0 if slowdown is None else slowdown.factor
        Path(f"speed{trainer.global_rank}").write_text(str(slowdown))


class OwnModule(pl.LightningModule):
    """With an optimizer that no configuration tells of."""

    def __init__(self, *, num_classes: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, num_classes))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch["input"]), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters())


class Noting(OwnModule):
    """Logs in every way; the statistics of its batch norm, and a mean over steps, are buffers."""

    def __init__(self, *, num_classes: int = 2, odd: bool = True, plateau: bool = False):
        super().__init__()
        self.plateau = plateau
        self.net = nn.Sequential(
            nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, num_classes)
        )
        self.mean, self.last = MeanMetric(), Last() if odd else MeanMetric()
        self.register_buffer("drifting", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/total", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("train/most", loss, on_epoch=True, on_step=False, reduce_fx=max)
        self.log("train/together", loss, on_epoch=True, on_step=False, sync_dist=True)
        if batch_idx == 0:
            self.log("train/first", loss, on_epoch=True, on_step=False)
        self.mean(loss)
        self.last(loss)
        self.log_dict(
            {"train/mean": self.mean, "train/last": self.last}, on_epoch=True, on_step=False
        )
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.drifting += 0.1 * (self.trainer.global_rank + 1 - self.drifting)
        self.log("train/ended", 0.1 * batch_idx, on_epoch=True, reduce_fx="sum")

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", super().training_step(batch, batch_idx))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if not self.plateau:
            return optimizer
        slower = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
        schedule = {"scheduler": slower, "interval": "step", "monitor": "train/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Last(Metric):
    """A metric whose states nobody knows how to merge."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value) -> None:
        self.value = value.detach()

    def compute(self):
        return self.value.mean()
