"""A rank that fails in a training on shards ends the others, with an error that names it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.errors import TransportError
from sparsepipe.spatial import grid as grid_module
from sparsepipe.strategies import SpatialStrategy
from tests.support.pipeline_cases import QUIET
from tests.support.processes import outcomes

TIMEOUT_S = 5.0
FAILING, STEP = 1, 2


class Net(pl.LightningModule):
    """Raises where a loss is no number, and lets something happen in the middle of a pass."""

    def __init__(self, act: Callable[[], None], place: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1)
        )
        self._act, self._place = act, place

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        faulty = batch_idx == STEP and self.global_rank == FAILING
        if faulty and self._place in ("forward", "backward"):
            self._end_at(1 if self._place == "forward" else 2)
        if faulty and self._place == "sum":
            # Of the last gradient, which the others wait to add to theirs.
            self.layers[0].bias.register_hook(lambda _: self._act())  # type: ignore[operator, union-attr]
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        if faulty and self._place == "check":
            loss = loss * float("nan")
        if not torch.isfinite(loss):
            raise ValueError("the loss is no number")
        return loss

    def _end_at(self, number: int) -> None:
        """Acts in an exchange of halos: two are of the forward pass."""
        start, calls = grid_module.start_messages, iter(range(100))

        def acting(*arguments: Any, **more: Any) -> Any:
            if next(calls) == number:
                self._act()
            return start(*arguments, **more)

        grid_module.start_messages = acting

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._place == "validation" and self.global_rank == FAILING and batch_idx == 1:
            self._act()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def without_one(rank: int, place: str, signum: int) -> tuple[str, float]:
    """A training in which a rank fails; the error of another one, and how long it took."""
    torch.manual_seed(0)
    net = Net(lambda: os.kill(os.getpid(), signum), place)
    data = torch.utils.data.TensorDataset(torch.randn(8, 2, 6, 9), torch.randint(3, (8, 6, 9)))
    trainer = pl.Trainer(
        **QUIET,
        max_epochs=1,
        devices=3,
        strategy=SpatialStrategy(grid=(1, 3), timeout_s=TIMEOUT_S),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    loader, began_s = DataLoader(data, batch_size=2), time.monotonic()
    try:
        trainer.fit(net, loader, loader)
    except TransportError as error:
        return str(error), time.monotonic() - began_s
    return "", 0.0


@pytest.mark.parametrize(
    ("place", "signum"),
    [
        ("forward", signal.SIGKILL),
        ("backward", signal.SIGKILL),
        ("sum", signal.SIGKILL),
        ("validation", signal.SIGKILL),
        ("check", 0),
        pytest.param("backward", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("sum", signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_the_others_end_and_name_it(place: str, signum: int) -> None:
    ending = [0, 1, 2] if place == "check" else [0, 2]
    found = outcomes(without_one, 3, place, signum, awaited=ending, join_group=False, limit_s=120.0)
    if place == "check":
        assert "the loss is no number" in str(found[FAILING].error)
    messages = []
    for outcome in (found[0], found[2]):
        assert outcome.error is None, outcome
        message, taken_s = outcome.value
        assert "remedy: " in message, "no error"
        assert taken_s < TIMEOUT_S + 45.0  # the store's own limits, on a busy machine
        messages.append(message)
    # A rank may see another one end that has already noticed.
    assert any(f"rank {FAILING} " in message for message in messages), messages
