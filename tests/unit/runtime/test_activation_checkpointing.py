"""A stage that recomputes its activations against the same stage that keeps them."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.sparse import (
    BatchNorm,
    GlobalAvgPool,
    Linear,
    ReLU,
    SparseTensor,
    watching_kernel_maps,
)
from tests.support.recomputation_cases import NETS, assert_equal, choices, ran, spans_of, wanting
from tests.support.weights_cases import CASES, Case, sparse_batch


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
@pytest.mark.parametrize("name", ["mlp", "conv", "dense dropout", "sparse dropout"])
def test_recomputation_changes_only_what_is_kept(name: str, keyed: bool) -> None:
    case = NETS[name]
    order = "F0 F1 B1 B0 F2 B2"
    expected = ran(case, [], keyed=keyed, order=order)
    for chosen, spans in choices(len(case.network())).items():
        if name == "sparse dropout" and keyed != (chosen in ("two", "each")):
            continue  # takes longer
        if name == "dense dropout" and chosen == "each":
            spans.pop(2)  # works in place
        assert_equal(ran(case, spans, keyed=keyed, order=order), expected)


def test_it_is_also_the_same_under_autocast() -> None:
    options = {"autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16)}
    for name in ("mlp", "sparse dropout"):
        expected = ran(NETS[name], [], order="F0 B0", **options)
        spans = spans_of((0, 3), (3, 6))
        assert_equal(ran(NETS[name], spans, order="F0 B0", **options), expected)


class Fork(nn.Module):
    """A tensor, the same once more, an integer, a sparse tensor and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(1, 4)

    def forward(self, x: SparseTensor) -> dict[str, Any]:
        y = self.linear(x)
        rows = torch.arange(len(x))
        return {"y": y.feats, "again": [y, y.feats], "rows": rows, "other": x, "n": 3}


class Join(nn.Module):
    def forward(self, tree: dict[str, Any]) -> SparseTensor:
        y, feats = tree["again"]
        assert tree["y"] is feats
        assert tree["other"].cache is y.cache
        total = feats * tree["y"] + tree["other"].feats
        return y.replace_feats(total.index_select(0, tree["rows"]) * tree["n"])


def branching() -> nn.Sequential:
    return nn.Sequential(ReLU(), Fork(), Join(), BatchNorm(4), GlobalAvgPool(), nn.Linear(4, 2))


def test_any_tree_may_be_the_kept_input() -> None:
    case = Case(branching, sparse_batch)
    expected = ran(case, [])
    for spans in ([(0, 6)], [(2, 4)], [(0, 2), (2, 6)], [(1, 2), (2, 3), (4, 6)]):
        assert_equal(ran(case, spans_of(*spans)), expected)


def test_a_norm_of_one_row_finds_the_statistics_of_its_own_forward() -> None:
    # It takes the running statistics, which other minibatches move on before its backward.
    case = Case(lambda: nn.Sequential(Linear(3, 4), BatchNorm(4), nn.Tanh()), lambda number: None)
    values = [
        torch.randn(rows, 3, generator=torch.Generator().manual_seed(4)) for rows in (1, 5, 1)
    ]
    order = "F0 F1 F2 B0 B1 B2"
    expected = ran(case, [], values=values, order=order)
    assert_equal(ran(case, spans_of((0, 3)), values=values, order=order), expected)
    assert expected.buffers["1.num_batches_tracked"] == 1


class Counting(nn.Module):
    """Counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x.sin()


def test_recomputed_layers_run_twice_and_others_once() -> None:
    network = nn.Sequential(*(Counting() for _ in range(5)))
    stage = StageLayers(network, network, first=0, last=4, recomputed=spans_of((1, 3)))
    closed = 0

    def close(run: Any) -> tuple[Tensor, None]:
        nonlocal closed
        closed += 1
        return run().sum(), None

    value = torch.randn(3, requires_grad=True)
    flight = stage.forward(value, minibatch=0, leaves={}, close=close)
    assert [layer.runs for layer in network] == [1] * 5
    flight.backward(None, leaves={})
    assert [layer.runs for layer in network] == [1, 2, 2, 1, 1]
    with torch.no_grad():
        stage.evaluate(value)
    assert [layer.runs for layer in network] == [2, 3, 3, 2, 2]
    assert closed == 1


def test_spans_share_the_kernel_maps_that_are_built_anew() -> None:
    times = []
    case = CASES["sparse"]
    with watching_kernel_maps(lambda: times.append(0)):
        ran(case, [], order="F0 B0")
        once = len(times)
        ran(case, choices(len(case.network()))["each"], order="F0 B0")
    assert 2 * once <= len(times) - once <= 2 * once + 2 * 5  # where a pool's span ends: 5 levels
    assert once > 0


@pytest.mark.parametrize(
    ("network", "batch"),
    [
        (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2)), "mlp"),
        (lambda: nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)), "mlp"),
        (lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True)), "mlp"),
        (lambda: nn.Sequential(ReLU(inplace=True), Linear(1, 2)), "sparse"),
    ],
)
def test_layers_that_change_the_kept_input_are_refused(network: Any, batch: str) -> None:
    layers = network()
    stage = StageLayers(layers, layers, first=0, last=1, recomputed=spans_of((0, 2)))
    value = wanting(CASES[batch].batch(0))
    with pytest.raises(ConfigError, match="one of layers 0 to 1 changes in place") as caught:
        stage.forward(value, minibatch=0, leaves={})
    assert "inplace=False" in caught.value.remedy


def test_buffers_that_a_second_run_would_change_again_are_refused() -> None:
    layers = nn.Sequential(nn.Tanh(), spectral_norm(nn.Linear(6, 6)))
    stage = StageLayers(layers, layers, first=0, last=1, recomputed=spans_of((0, 2)))
    with pytest.raises(ConfigError, match=r"layers 0 to 1 .*change its buffer '_u'") as caught:
        stage.forward(CASES["mlp"].batch(0), minibatch=0, leaves={})
    assert "leave that layer out" in caught.value.remedy


def test_nothing_waits_for_the_garbage_collector() -> None:
    ran(NETS["sparse dropout"], spans_of((0, 5), (5, 9)), order="F0 B0")  # makes what stays
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        ran(NETS["sparse dropout"], spans_of((0, 5), (5, 9)), order="F0 B0")
        after = tensors_alive()
    finally:
        gc.enable()
    assert after <= before


def tensors_alive() -> int:
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())
