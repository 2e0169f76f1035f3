"""Every strategy with two ranks on one CUDA device, over gloo; data parallelism over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sparsepipe.strategies import DataParallelStrategy
from tests.support import accumulation, asynchronous_cases, synchronous_cases
from tests.support.asynchronous_cases import grid_rows, leaders, num_ranks
from tests.support.pipeline_cases import (
    BATCH,
    OPTIMIZERS,
    QUIET,
    Net,
    dealt,
    make_loader,
    own_node,
    same,
    weights,
)
from tests.support.processes import run

ACCELERATOR, DEVICE = "gpu", torch.device("cuda", 0)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROUNDING = 1e-5
RANKS, EPOCHS, STEPS = 2, 2, 3
Asynchronous, Synchronous = asynchronous_cases.Case, synchronous_cases.Case

ASYNCHRONOUS = [
    Asynchronous("1-1"),
    Asynchronous("1-1", net="sparse", minibatches=4),
    Asynchronous("1-1", net="residual", minibatches=4, epochs=1),
    Asynchronous("1-1", mode="vertical_sync"),
    Asynchronous("1-1", mode="spectrain", minibatches=4),
    Asynchronous("1-1", mode="none", minibatches=4),
    Asynchronous("1-1", optimizer="decay", step_size=3),
]
SYNCHRONOUS = [
    Synchronous("1-1", 4, "gpipe"),
    Synchronous("1-1", 3, "1f1b", net="dense", samples=34),
    Synchronous("1-1", 7, "eager_1f1b"),
    Synchronous("1-1", 3, "1f1b", net="sparse_drop", samples=22, epochs=1),
    Synchronous("1-1", 4, "1f1b", recompute="all"),
    Synchronous("1-1", 3, "gpipe", net="sparse_drop", samples=22, epochs=1, recompute="all"),
    Synchronous("2", 4, "1f1b", net="dense", samples=68),
]
GRID_RANKS = 3
GRIDS = [row for row in grid_rows() if num_ranks(row) == GRID_RANKS]
DATA_PARALLEL = {"normless": "dense", "sparse_normless": "sparse"}
"""Networks, and whose data they get."""


def train(rank: int) -> dict[str, Any]:
    """All cases in the same processes, one after the other."""
    places = own_node(rank, RANKS, accelerator=ACCELERATOR)
    return {
        "asynchronous": asynchronous_cases.train(rank, ASYNCHRONOUS, **places),
        "synchronous": synchronous_cases.train(rank, SYNCHRONOUS, **places),
        "data parallel": {
            net: train_whole(net, rank, backend="gloo", **places) for net in DATA_PARALLEL
        },
    }


@pytest.fixture(scope="module")
def everyone() -> list[dict[str, Any]]:
    return run(train, RANKS, limit_s=280)


@pytest.mark.parametrize("number", range(len(ASYNCHRONOUS)), ids=lambda n: str(ASYNCHRONOUS[n]))
def test_an_asynchronous_pipeline_equals_a_replay(number: int, everyone: Any) -> None:
    found = [each["asynchronous"][number] for each in everyone]
    asynchronous_cases.check(ASYNCHRONOUS[number], found, device=DEVICE, rounding=ROUNDING)


@pytest.mark.parametrize("number", range(len(SYNCHRONOUS)), ids=lambda n: str(SYNCHRONOUS[n]))
def test_a_synchronous_pipeline_equals_gradient_accumulation(number: int, everyone: Any) -> None:
    found = [each["synchronous"][number] for each in everyone]
    accumulation.check(SYNCHRONOUS[number], found, device=DEVICE, rounding=ROUNDING)


class Places(pl.Callback):
    """Where a training ran, and over what."""

    found: tuple[str, int, str]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = dist.get_backend(), dist.get_world_size(), pl_module.device.type


def fresh(net: str) -> Net:
    torch.manual_seed(11)
    return Net(synchronous_cases.NETS[net]())


def train_whole(net: str, rank: int = 0, *, backend: str, num_nodes: int, **places: Any) -> Any:
    """A training by data parallelism: weights, the loss, and where it ran."""
    module = fresh(net)
    loader = dealt(STEPS * num_nodes, readers=num_nodes, reader=rank, net=DATA_PARALLEL[net])
    trainer = pl.Trainer(
        **{**QUIET, "num_nodes": num_nodes, **places},
        max_epochs=EPOCHS,
        strategy=DataParallelStrategy(process_group_backend=backend, timeout_s=60),
        callbacks=[there := Places()],
    )
    trainer.fit(module, loader)
    return weights(module.layers), float(trainer.callback_metrics["loss_epoch"]), there.found


def trained_by_one(net: str, *, ranks: int) -> tuple[dict[str, Tensor], float]:
    """The oracle: plain descent on whole batches, of which each rank had a share."""
    layers = fresh(net).layers.to(DEVICE)
    loader = make_loader(DATA_PARALLEL[net], batches=STEPS * ranks)
    optimizer = OPTIMIZERS["momentum"](layers.parameters())
    for _ in range(EPOCHS):
        losses = []
        whole = DataLoader(loader.dataset, batch_size=ranks * BATCH, collate_fn=loader.collate_fn)
        for x, y in whole:
            loss = F.cross_entropy(layers(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return layers.state_dict(), sum(losses) / len(losses)


def check_data_parallel(net: str, found: Sequence[Any], *, backend: str) -> None:
    expected, expected_loss = trained_by_one(net, ranks=len(found))
    losses = [loss for _, loss, _ in found]  # each of its own share
    assert sum(losses) / len(losses) == pytest.approx(expected_loss, rel=ROUNDING)
    for state, _, where in found:
        assert where == (backend, len(found), DEVICE.type)
        for name, value in state.items():
            assert torch.equal(value, found[0][0][name]), "ranks differ"
            assert same(value, expected[name], rounding=ROUNDING), name


@pytest.mark.parametrize("net", DATA_PARALLEL)
def test_data_parallelism_over_gloo_equals_whole_batches(net: str, everyone: Any) -> None:
    check_data_parallel(net, [each["data parallel"][net] for each in everyone], backend="gloo")


@pytest.mark.parametrize("net", DATA_PARALLEL)
def test_data_parallelism_over_nccl_with_one_rank(net: str) -> None:
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    found = train_whole(net, backend=backend, accelerator=ACCELERATOR, devices=1, num_nodes=1)
    check_data_parallel(net, [found], backend=backend)


def train_on_grids(rank: int) -> list[Any]:
    kinds = {Asynchronous: asynchronous_cases, Synchronous: synchronous_cases}
    places = own_node(rank, GRID_RANKS, accelerator=ACCELERATOR)
    return [kinds[type(row)].train(rank, [row], **places)[0] for row in GRIDS]


def test_pipelines_with_stages_that_are_grids_equal_one_process() -> None:
    everyone = run(train_on_grids, GRID_RANKS, limit_s=240)
    for number, row in enumerate(GRIDS):
        found = leaders([each[number] for each in everyone], row)
        if isinstance(row, Synchronous):
            accumulation.check(row, found, device=DEVICE, rounding=1e-9)
        else:
            asynchronous_cases.check(row, found, device=DEVICE, rounding=1e-4)
