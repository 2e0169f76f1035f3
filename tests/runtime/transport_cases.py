"""What tests of the transport send, and a network to send it over."""

import hashlib
from typing import Any

import torch
from plans import plan_of
from torch import Tensor

from sparsepipe.runtime.transport import Kind, Message, Network
from sparsepipe.sparse import SparseTensor

A, G, B, R = Kind.ACTIVATION, Kind.GRADIENT, Kind.BATCH, Kind.REPLY


def network(config: str, rank: int, **more: Any) -> Network:
    return Network(plan_of(config), rank, **{"timeout_s": 30.0, **more})


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
