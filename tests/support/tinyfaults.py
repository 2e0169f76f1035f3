"""Faults for tests: one rank dies, stands still, raises or is cut off at a chosen place, once."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn

from sparsepipe.spatial import grid
from tests.support.tinyhouse import LONG_S, mlp

MARK = Path("injected")
CUT_OFF = -1


def cut_off() -> None:
    """Ends every connection of this process, as a cable that is pulled does."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed already, or it only listens


class Injection(pl.Callback):
    """Acts once in a directory's life.

    Args:
        rank: whom it happens to.
        place: ``start`` (before the network is split), ``batch`` (as a training step begins),
            ``forward`` (in a step, when this rank's first weights are used for the second time),
            ``exchange`` (in a step, in the second exchange of halos between shards),
            ``update`` (within a step or a drain, before the optimizer's), ``validation`` (as
            a batch begins), ``checkpoint`` (while one is put together).
        signum: what the process sends to itself; 0 raises an exception instead, and
            ``CUT_OFF`` ends its connections.
        epoch: in which epoch.
        count: at which batch or update of that epoch on this rank.
    """

    def __init__(self, *, rank: int, place: str, signum: int, epoch: int = 0, count: int = 0):
        self.rank, self.place, self.signum = rank, place, signum
        self.epoch, self.count = epoch, count
        self.updates = 0
        self.batch, self.forwards, self.exchanges = 0, 0, 0

    def act(self, trainer, place: str, count: int) -> None:
        here = (trainer.global_rank, place, trainer.current_epoch, count)
        if here != (self.rank, self.place, self.epoch, self.count) or MARK.exists():
            return None
        MARK.touch()
        if self.signum == 0:
            raise ValueError("somebody's own mistake")
        if self.signum == CUT_OFF:
            return cut_off()
        return os.kill(os.getpid(), self.signum)

    def setup(self, trainer, pl_module, stage):
        if stage == "fit":
            self.act(trainer, "start", self.count)

    def on_train_start(self, trainer, pl_module):
        if (self.rank, self.place) == (trainer.global_rank, "exchange"):
            self.watch_exchanges(trainer)
        if (self.rank, self.place) != (trainer.global_rank, "forward"):
            return  # no fault in a forward here, and maybe no parameters in this stage either
        held = (layer for layer in pl_module.layers if any(True for _ in layer.parameters()))
        next(held).register_forward_pre_hook(lambda *_: self.on_forward(trainer))

    def watch_exchanges(self, trainer):
        start = grid.start_messages

        def starting(*arguments, **more):
            self.exchanges += 1
            if self.exchanges == 2:
                self.act(trainer, "exchange", self.batch)
            return start(*arguments, **more)

        grid.start_messages = starting

    def on_forward(self, trainer):
        self.forwards += 1
        if self.forwards == 2:
            self.act(trainer, "forward", self.batch)

    def on_train_epoch_start(self, trainer, pl_module):
        self.updates = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch, self.forwards, self.exchanges = batch_idx, 0, 0
        self.act(trainer, "batch", batch_idx)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.act(trainer, "update", self.updates)
        self.updates += 1

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.act(trainer, "validation", batch_idx)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.act(trainer, "checkpoint", self.count)


class Mistake(nn.Module):
    """A layer that cannot compute."""

    def forward(self, x):
        raise ValueError("somebody's own mistake")


class Greed(nn.Module):
    """A layer that wants more memory than any process can address, of the allocator of torch."""

    def forward(self, x):
        return x + torch.empty(2**50, dtype=torch.uint8)


class Patience(nn.Module):
    """A layer that takes minutes and says when it has begun."""

    def forward(self, x):
        Path("in-layer").touch()
        time.sleep(LONG_S)
        return x


def mistaken(*, num_classes: int, width: int, dropout: float, norm: bool):
    layers = mlp(num_classes=num_classes, width=width, dropout=dropout, norm=norm)
    return nn.Sequential(*layers, Mistake())


def greedy(*, num_classes: int, width: int, dropout: float, norm: bool):
    layers = mlp(num_classes=num_classes, width=width, dropout=dropout, norm=norm)
    return nn.Sequential(*layers, Greed())


def patient(*, num_classes: int, width: int, dropout: float, norm: bool):
    layers = mlp(num_classes=num_classes, width=width, dropout=dropout, norm=norm)
    return nn.Sequential(*layers, Patience())
