"""A stage that recomputes its activations on a CUDA device: same bits, same draws, less memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.stage import StageLayers
from tests.support.recomputation_cases import NETS, assert_equal, choices, generators, ran, spans_of

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, ROWS = 256, 512
OUTPUT_BYTES = 4 * WIDTH * ROWS
LENGTH = 12


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
@pytest.mark.parametrize("name", ["mlp", "dense dropout", "sparse dropout"])
def test_nothing_changes_but_what_is_kept(name: str, keyed: bool) -> None:
    case, order = NETS[name], "F0 F1 B1 B0 F2 B2"
    again = partial(ran, case, keyed=keyed, order=order, device=DEVICE)
    expected = again([])
    assert all(output.device == DEVICE for output in expected.outputs)
    for chosen, spans in choices(len(case.network())).items():
        if name == "dense dropout" and chosen == "each":
            spans.pop(2)  # works in place
        assert_equal(again(spans), expected)


def test_keys_choose_the_draws_of_the_device() -> None:
    """Else the test above could not fail."""
    net = nn.Sequential(nn.Dropout(0.5))
    ones = torch.ones(1000, device=DEVICE)
    stage = StageLayers(
        net, net, first=0, last=0, randomness=KeyedRandomness(seed=3, device=DEVICE)
    )

    def drawn(minibatch: int) -> torch.Tensor:
        return stage.forward(ones, minibatch=minibatch, leaves={}).output

    one = drawn(1)
    torch.rand(7, device=DEVICE)
    before = generators(DEVICE)
    assert torch.equal(drawn(1), one)
    assert not torch.equal(drawn(2), one)
    assert all(map(torch.equal, generators(DEVICE), before))


def test_it_is_also_the_same_under_autocast() -> None:
    options = {"autocast": partial(torch.autocast, DEVICE.type, dtype=torch.bfloat16)}
    for name in ("mlp", "sparse dropout"):
        expected = ran(NETS[name], [], order="F0 B0", device=DEVICE, **options)
        found = ran(NETS[name], spans_of((0, 3), (3, 6)), order="F0 B0", device=DEVICE, **options)
        assert_equal(found, expected)


def kept_bytes(recomputed: Sequence[range]) -> int:
    """What a minibatch in flight holds beside its input, and what its backward leaves behind."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) if n % 2 == 0 else nn.Tanh() for n in range(LENGTH)]
    network = nn.Sequential(*layers).to(DEVICE)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    stage = StageLayers(network, network, first=0, last=LENGTH - 1, recomputed=recomputed)
    value = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    gradient = torch.ones(ROWS, WIDTH, device=DEVICE)
    for minibatch in range(2):  # libraries take what they work in at the first
        before = torch.cuda.memory_allocated(DEVICE)
        flight = stage.forward(value, minibatch=minibatch, leaves=leaves)
        kept = torch.cuda.memory_allocated(DEVICE) - before
        flight.backward([gradient], leaves=leaves)
        flight.output = None
    assert torch.cuda.memory_allocated(DEVICE) == before
    return kept


def test_stored_memory_falls_to_the_boundaries() -> None:
    """Of a linear layer and Tanh the latter's output stays, which the next one takes."""
    assert kept_bytes([]) == LENGTH // 2 * OUTPUT_BYTES
    assert kept_bytes(spans_of((0, 6), (6, 12))) == 2 * OUTPUT_BYTES
    assert kept_bytes(spans_of((0, 6))) == (1 + 3) * OUTPUT_BYTES
    assert kept_bytes(spans_of((0, 12))) == OUTPUT_BYTES
