"""Packets whose receives are posted beforehand, and that all arrive unchanged."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsepipe.runtime.transport import channel
from sparsepipe.runtime.transport.channel import MOST_BYTES, RepeatedSizes, TransferMode
from sparsepipe.runtime.transport.serialization import LENGTH_BYTES
from tests.support.processes import run
from tests.support.transport_cases import A, message, network

_PLAIN, _BEGINS = TransferMode(0), TransferMode.AGAIN
_AWAITED = TransferMode.POSTED | TransferMode.AGAIN


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ("abcab", "....."),
        ("aabbaabb", "........"),
        ("aaaaa", "..b!!"),
        ("abbbbab", "...b!.!"),
        ("aaabbbba", "..b....!"),  # a posted receive cannot be taken back
        ("aa  a a", "..  b !"),  # nothing follows some headers
        ("aaaAAAaa", "..b...!!"),  # capitals: of an evaluation
        ("AAAaaa", ".....b"),
        ("++++aaaa", "......b!"),  # too large
    ],
)
def test_receives_are_posted_after_three_packets_of_the_same_sizes(sizes: str, how: str) -> None:
    alike = RepeatedSizes()
    marks = {_PLAIN: ".", _BEGINS: "b", _AWAITED: "!"}
    of = {" ": (), "+": (MOST_BYTES, 1)}
    found = [alike.next(of.get(s, (ord(s.lower()),)), repeats=not s.isupper()) for s in sizes]
    assert "".join(map(marks.__getitem__, found)) == how.replace(" ", ".")


_ROWS = [10_000, 10_000, 10_000, 10_000, 70, 10_000, 3, 3, 3, 0, 10_000, 600_000, 10_000]
"""Of packets: under and over what goes into a header, what is pooled and what is asked for."""


def mixed_rank(rank: int) -> tuple[list[bool], int]:
    """Sends equal and unequal packets; those posted beforehand, and buffers left in use."""
    awaited = []

    parse = channel.parse

    def noted(blocks: list[Tensor]) -> Any:
        awaited.append(TransferMode.POSTED in TransferMode(int(blocks[0][LENGTH_BYTES])))
        return parse(blocks)

    channel.parse = noted
    net = network("1-1", rank)
    for m, rows in enumerate(_ROWS * 2):
        values = torch.arange(rows) * (m + 1)
        if rank == 0:
            net.send(A, 1, message(m, [values, values[:1].clone()]), held_back=m % 5 == 4)
        else:
            got = net.receive(A, 0, minibatch=m).tree
            assert torch.equal(got[0], values)
            assert torch.equal(got[1], values[:1])
            del got
        net.release(m)
    net.close()
    return awaited, net.pool.in_use


def test_packets_alike_and_not_arrive_in_their_order() -> None:
    awaited, left = run(mixed_rank, 2)[1]
    alike = RepeatedSizes()
    expected = [
        TransferMode.POSTED
        in alike.next((8 * rows,) if 8 * rows > 2048 else (), repeats=m % 5 != 4)
        for m, rows in enumerate(_ROWS * 2)
    ]
    assert sum(expected) > 8
    assert any(a and not b for a, b in pairwise(expected))
    assert any(b and not a for a, b in pairwise(expected))
    assert awaited == expected
    assert left == 0
