"""The network where tensors are on CUDA devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsepipe.runtime.transport import Kind, Message, Network
from sparsepipe.sparse import SparseTensor
from tests.support.busy_device import late_zero
from tests.support.plans import plan_of
from tests.support.processes import run

A, G, B = Kind.ACTIVATION, Kind.GRADIENT, Kind.BATCH

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
MINIBATCHES = 16
MOST_SITES = 7919 * 5


def cloud(minibatch: int, device: torch.device) -> SparseTensor:
    """The same in every rank, of a size that depends on the minibatch."""
    sites = 7919 * (minibatch % 6)  # none, too
    feats = torch.arange(sites * 8, dtype=torch.float32).reshape(sites, 8) + minibatch
    coords = torch.arange(sites * 4, dtype=torch.int32).reshape(sites, 4) + minibatch
    return SparseTensor(feats, coords, batch_size=1).to(device)


def differing(minibatch: int, **pairs: tuple[torch.Tensor, torch.Tensor]) -> list[Any]:
    return [(minibatch, name) for name, pair in pairs.items() if not torch.equal(*pair)]


def exchange_rank(rank: int, config: str, devices: int, direct: bool) -> Any:
    """One forward, one backward; features are made on the device just before they are sent.

    Returns:
        What did not come as it was sent, by minibatch.
    """
    device = torch.device("cuda", rank % devices)
    torch.cuda.set_device(device)
    net = Network(plan_of(config), rank, timeout_s=60.0, device=device, direct=direct)
    bad = []
    for m in range(MINIBATCHES):
        expected = cloud(m, device)
        if rank == 0:
            # A send right behind slow kernels must wait for what they make; the memory is
            # freed and asked for again at once.
            made = expected.replace_feats(expected.feats + late_zero(device))
            net.send(B, 1, Message(minibatch=m, tree={"label": torch.arange(m), "x": made.coords}))
            net.send(A, 1, Message(minibatch=m, tree=made))
            del made
            torch.full((8 * MOST_SITES,), -1.0, device=device)
            (back,) = net.receive(G, 1, minibatch=m).tree
            bad += differing(m, gradient=(back, 2 * expected.feats))
            del back
        else:
            got, rest = net.receive(A, 0, minibatch=m).tree, net.receive(B, 0, minibatch=m).tree
            assert rest["label"].device.type == "cpu"
            assert got.feats.device == got.coords.device == rest["x"].device == device
            bad += differing(
                m,
                features=(got.feats, expected.feats),
                coords=(got.coords, expected.coords),
                batch=(rest["x"], expected.coords),
                labels=(rest["label"], torch.arange(m)),
            )
            twice = 2 * got.feats + late_zero(device)
            net.send(G, 0, Message(minibatch=m, tree=[twice]))
            del got, rest, twice
            torch.full((8 * MOST_SITES,), -1.0, device=device)
        net.release(m)
    net.close()
    assert net.pool.in_use == 0
    return bad


def test_through_pinned_memory_on_one_device() -> None:
    assert run(exchange_rank, 2, "1-1", 1, False, limit_s=240) == [[], []]


@needs_two
def test_through_pinned_memory_between_devices() -> None:
    assert run(exchange_rank, 2, "1-1", 2, False, limit_s=240) == [[], []]


@needs_two
def test_directly_between_devices() -> None:
    assert run(exchange_rank, 2, "1-1", 2, True, limit_s=240) == [[], []]
