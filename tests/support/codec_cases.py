"""Trees of all kinds, and their way through the codec in one process."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsepipe.runtime.transport import Kind, Message
from sparsepipe.runtime.transport.serialization import (
    BLOCK_BYTES,
    Packet,
    encode,
    missing_bytes,
    parse,
)
from sparsepipe.sparse import SparseTensor

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
]
HOST = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Opaque:
    """No pytree node."""

    label: Tensor
    name: str


def packet_of(tree: Any, **more: Any) -> Packet:
    return encode([(Kind.ACTIVATION, Message(minibatch=7, tree=tree, **more))])


def received(packet: Packet) -> list[tuple[Kind, Message]]:
    """What the other side makes of a packet; only bytes cross, as over a wire."""
    assert packet.blocks[0].numel() == BLOCK_BYTES
    missing = missing_bytes(packet.blocks[0])
    assert missing == sum(block.numel() for block in packet.blocks[1:])
    header = parse([block.clone() for block in packet.blocks])
    sizes = [spec.size_bytes for spec in header.following("host")]
    assert sizes == [flat.numel() for flat in packet.host]
    roomy = [torch.cat([flat, torch.full((5,), 255, dtype=torch.uint8)]) for flat in packet.host]
    return list(header.assemble(roomy, [], device=HOST))


def over(tree: Any, **more: Any) -> Any:
    ((kind, message),) = received(packet_of(tree, **more))
    assert (kind, message.minibatch) == (Kind.ACTIVATION, 7)
    return message.tree


def raw(tensor: Tensor) -> bytes:
    """The elements' bits, in the order of indices."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(copy.untyped_storage())


def assert_same(left: Any, right: Any) -> None:
    """Equal in type, structure and bits (NaN too)."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.requires_grad == right.requires_grad
        assert right.is_leaf
        assert raw(left) == raw(right)
    elif isinstance(left, SparseTensor):
        assert left._context() == right._context()
        assert_same([left.feats, left.coords], [right.feats, right.coords])
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert_same(list(left.values()), list(right.values()))
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, shape (also empty and 0-dim), bits, and layout."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    high = 2 if dtype == torch.bool else 256
    size = [*shape, dtype.itemsize]
    bits = torch.randint(0, high, size, generator=generator, dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(shape)
    how = draw(st.sampled_from(["as is", "transposed", "every other", "expanded", "tail"]))
    if how == "transposed":
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    elif how == "every other" and shape:
        tensor = tensor[..., ::2]
    elif how == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    elif how == "tail" and shape:
        tensor = tensor[1:]
    wants = draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex)
    return tensor.requires_grad_(wants)


@st.composite
def sparse_tensors(draw: st.DrawFn) -> SparseTensor:
    sites, channels = draw(st.integers(0, 300)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return SparseTensor(
        torch.randn(sites, channels, generator=generator).requires_grad_(draw(st.booleans())),
        torch.randint(0, 9, (sites, 4), generator=generator, dtype=torch.int32),
        stride=draw(st.sampled_from([1, 2, (1, 2, 4)])),
        spatial_shape=draw(st.sampled_from([None, (9, 9, 9)])),
        batch_size=9,
    )


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
leaves = plain | tensors() | sparse_tensors()
keys = st.text(max_size=5) | st.integers()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
    ),
    max_leaves=12,
)
