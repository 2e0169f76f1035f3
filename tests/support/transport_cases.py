"""What tests of the transport send, a network to send it over, and what it complains of."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from sparsepipe.errors import TransportError
from sparsepipe.runtime.transport import Kind, Message, Network
from sparsepipe.sparse import SparseTensor
from tests.support.plans import plan_of
from tests.support.processes import Outcome
from tests.support.waiting import LONG_S

A, G, B, R = Kind.ACTIVATION, Kind.GRADIENT, Kind.BATCH, Kind.REPLY


def network(config: str, rank: int, **more: Any) -> Network:
    return Network(plan_of(config), rank, **{"timeout_s": LONG_S, **more})


def message(minibatch: int, tree: Any = None, **meta: Any) -> Message:
    return Message(minibatch=minibatch, meta=meta, tree=tree)


def cloud(minibatch: int, channels: int = 16) -> SparseTensor:
    """A sparse tensor whose number of sites depends on the minibatch; known to every rank."""
    generator = torch.Generator().manual_seed(minibatch)
    sites = int(torch.randint(0, 20_000, (), generator=generator))
    return SparseTensor(
        torch.randn(sites, channels, generator=generator),
        torch.randint(0, 64, (sites, 4), generator=generator, dtype=torch.int32),
        batch_size=64,
    )


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def complaint(outcome: Outcome) -> str:
    """What a rank ended with: it names a remedy, too."""
    assert isinstance(outcome.error, TransportError), str(outcome)
    assert outcome.error.remedy
    return outcome.error.message
