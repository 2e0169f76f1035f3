"""Trees as packets and back, in one process: nothing is lost, nothing is sent twice."""

from __future__ import annotations

import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.transport import Kind, Message, differentiable
from sparsepipe.runtime.transport.serialization import (
    BLOCK_BYTES,
    Packet,
    encode,
    missing_bytes,
    parse,
)
from sparsepipe.sparse import SparseTensor

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.float8_e4m3fn),
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


class Kept:
    """A pytree node whose cache is none of it."""

    def __init__(self, weight: Tensor, cached: Tensor | None = None) -> None:
        self.weight, self.cached = weight, cached


pytree.register_pytree_node(
    Kept, lambda node: ([node.weight], None), lambda children, _: Kept(*children)
)


@dataclass(frozen=True)
class Constant:
    """A pytree node without leaves."""

    name: str


pytree.register_constant(Constant)


@settings(max_examples=200, deadline=None)
@given(tree=trees)
def test_every_tree_comes_back_bit_for_bit(tree: Any) -> None:
    assert_same(tree, over(tree))


@settings(max_examples=50, deadline=None)
@given(trees=st.lists(trees, min_size=2, max_size=2), meta=st.dictionaries(keys, plain))
def test_two_messages_share_a_packet(trees: list[Any], meta: dict[Any, Any]) -> None:
    kinds = [Kind.ACTIVATION, Kind.BATCH]
    sent = [Message(minibatch=3, meta=meta, tree=tree) for tree in trees]
    found = received(encode(list(zip(kinds, sent, strict=True))))
    assert [kind for kind, _ in found] == kinds
    for one, (_, other) in zip(sent, found, strict=True):
        assert other.minibatch == 3
        assert dict(other.meta) == meta
        assert_same(one.tree, other.tree)


def test_dense_tensors_are_not_copied_and_keep_their_layout() -> None:
    image = torch.randn(2, 16, 10, 10).to(memory_format=torch.channels_last)
    packet = packet_of(image)
    assert [flat.data_ptr() for flat in packet.host] == [image.data_ptr()]
    ((_, message),) = received(packet)
    assert message.tree.stride() == image.stride() == (1600, 1, 160, 16)
    assert torch.equal(message.tree, image)


def test_payload_is_the_tensors_and_overhead_the_header() -> None:
    coords = torch.randint(0, 9, (100, 4), dtype=torch.int32)
    wide, narrow = torch.randn(100, 64), torch.randn(100, 3)
    one = SparseTensor(wide, coords, batch_size=9)
    two = SparseTensor(narrow, coords, batch_size=9)
    packet = packet_of({"deep": one, "skip": (two, wide), "scale": torch.tensor(2.0)})
    features, sites, few, scale = 100 * 64 * 4, 100 * 4 * 4, 100 * 3 * 4, 4
    assert packet.payload_bytes == (features + sites + few + scale,)
    on_the_wire = sum(flat.numel() for flat in (*packet.blocks, *packet.host))
    assert on_the_wire == packet.payload_bytes[0] + packet.overhead_bytes
    assert len(packet.blocks) == 1
    # The sites (1,600 bytes) and the scale fit into the header, features do not.
    assert packet.overhead_bytes == 4096 - 1600 - 4
    found = over({"deep": one, "skip": (two, wide)})
    assert found["deep"].coords is found["skip"][0].coords
    assert found["deep"].feats is found["skip"][1]


def test_a_long_header_takes_a_second_block() -> None:
    meta = {"log": list(range(3000))}
    packet = packet_of(torch.zeros(9), meta=meta)
    assert len(packet.blocks) == 2
    ((_, message),) = received(packet)
    assert message.meta == meta


def test_gradients_have_the_same_order_on_both_sides() -> None:
    shared = torch.randn(600, requires_grad=True)
    tree = {
        "b": [torch.randn(2, requires_grad=True), torch.zeros(2), shared],
        "a": (shared, SparseTensor(torch.randn(3, 2, requires_grad=True), torch.zeros(3, 4).int())),
        "n": 3.0,
    }
    ours, theirs = differentiable(tree), differentiable(over(tree))
    assert [len(t) for t in ours] == [2, 600, 3]
    assert [raw(t) for t in ours] == [raw(t) for t in theirs]


@pytest.mark.parametrize("kind", [Kind.GRADIENT, Kind.REPLY])
def test_gradients_and_replies_are_plain_values(kind: Kind) -> None:
    x = torch.randn(3, requires_grad=True)
    tree = [x, x.sum(), Opaque(x * 2, "x")]
    ((_, message),) = received(encode([(kind, Message(minibatch=0, tree=tree))]))
    found = [*message.tree[:2], message.tree[2].label]
    assert [t.requires_grad for t in found] == [False] * 3
    assert [raw(t) for t in found] == [raw(t) for t in (x, x.sum(), x * 2)]


def test_a_waiting_packet_does_not_keep_the_graph() -> None:
    saved = torch.randn(5000)
    output = torch.randn(5000, requires_grad=True) * saved
    in_graph = weakref.ref(saved)
    packet = packet_of([output])
    del saved
    assert in_graph() is not None
    del output
    assert in_graph() is None
    assert not packet.changed()


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (Opaque(torch.ones(2, requires_grad=True), "x"), "object that is not a pytree node"),
        (lambda: 3, "a value that cannot be pickled"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2).as_subclass(type("Mine", (Tensor,), {})), "a Mine of layout"),
    ],
    ids=["hidden gradient", "lambda", "sparse layout", "subclass"],
)
def test_values_that_cannot_be_sent_are_refused(tree: Any, says: str) -> None:
    with pytest.raises(ConfigError, match="the activation of minibatch 7 holds") as caught:
        packet_of([tree])
    assert says in caught.value.message
    assert caught.value.remedy


def test_a_later_write_is_noticed_where_it_matters() -> None:
    large, small, strided = torch.zeros(5000), torch.zeros(5), torch.zeros(5000, 2)
    packet = packet_of([large, small, strided[:, 0]])
    small.add_(1)  # its bytes are in the header
    strided.add_(1)  # it was copied
    assert not packet.changed()
    large.add_(1)
    assert packet.changed()
