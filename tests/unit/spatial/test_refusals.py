"""What cannot be computed on shards is refused on every rank, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.spatial import Grid, cut, rule, spatialize
from sparsepipe.spatial import grid as grid_module
from tests.support.processes import outcomes, run_shared
from tests.support.spatial_nets import UNet, chain


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


class OwnConvolution(torch.autograd.Function):
    """Its backward pass would convolve shards of gradients as if they were whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        return torch.nn.grad.conv2d_input(x.shape, weight, gradient, padding=1), None


def aten(name: str) -> Any:
    return getattr(torch.ops.aten, name)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "unfold": lambda x, w: F.unfold(x, 3),
    "grid_sample": lambda x, w: F.grid_sample(x, torch.zeros(2, 3, 3, 2, dtype=x.dtype)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x),
    "pool with indices": lambda x, w: F.max_pool2d(x, 2, return_indices=True),
    "fft": lambda x, w: torch.fft.fft2(x),
    "einsum": lambda x, w: torch.einsum("bchw,dchw->bd", x, x),
    "stack": lambda x, w: torch.stack([x, x]),
    "where without values": lambda x, w: torch.where(x > 0),
    "batch norm of columns": lambda x, w: F.batch_norm(
        x.permute(0, 3, 1, 2), None, None, training=True
    ),
    "classes along width": lambda x, w: F.cross_entropy(
        x[:1].permute(0, 3, 1, 2), torch.zeros(1, 4, 8, dtype=torch.int64)
    ),
    "items": lambda x, w: x.tolist(),
    "data": lambda x, w: x.data,
    "operator of aten": lambda x, w: aten("avg_pool2d")(x, [2, 2]),
    "own autograd function": OwnConvolution.apply,
    "own autograd function, used": lambda x, w: F.relu(OwnConvolution.apply(x, w)),
    "window too large": lambda x, w: F.conv2d(x, w, dilation=9),
    "sizes that differ": lambda x, w: x + F.avg_pool2d(x, 2),
    "plain sizes that differ": lambda x, w: x + x.new_ones(5),
    "in place of what all ranks have": lambda x, w: torch.zeros(2, 4, 8, 10, dtype=x.dtype).add_(x),
    "out": lambda x, w: torch.add(x, x, out=torch.zeros(2, 4, 8, 10, dtype=x.dtype)),
    "size_average": lambda x, w: F.mse_loss(x, x.detach(), size_average=False),
}


def refused(rank: int) -> dict[str, str]:
    grid, found = Grid((1, 2)), {}
    x = grid.shard(torch.randn(2, 4, 8, 10, dtype=torch.float64)).clone().requires_grad_()
    for name, function in FUNCTIONS.items():
        model = spatialize(nn.Sequential(nn.Identity(), nn.Sequential(Calls(function))), grid)
        try:
            model(x)
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_functions_without_a_rule_are_refused() -> None:
    for found in run_shared(refused, 2):
        assert set(FUNCTIONS) - set(found) == set(), "passed in silence"
        assert all("remedy: " in text for text in found.values())
        assert "fft_fft2 has no rule" in found["fft"]
        assert "called by Calls.forward" in found["fft"]
        assert "Tensor.data has no rule" in found["data"]
        assert "@sparsepipe.spatial.rule" in found["fft"]


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).real * self.weight


class SpectrumByRule(Spectrum):
    """The same, with a rule."""


@rule(SpectrumByRule)
def _spectrum(module: Spectrum, grid: Grid, x: Tensor) -> Tensor:
    return cut(Spectrum.forward(module, grid.gather(x)), grid)


def rule_errors(rank: int) -> list[float]:
    grid = Grid((1, 2))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), SpectrumByRule(), nn.Conv2d(3, 2, 3, padding=1)
    ).double()
    whole = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    expected = model(whole)
    expected.square().sum().backward()
    gradients = [each.grad for each in model.parameters()]
    model.zero_grad()
    output = spatialize(model, grid)(grid.shard(whole))
    output.square().sum().backward()
    found = [float((grid.gather(output) - expected).abs().max())]
    for parameter, theirs in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        found.append(float((parameter.grad - theirs).abs().max() / theirs.abs().max()))
    return found


def test_a_rule_of_ones_own_makes_a_module_exact() -> None:
    for found in run_shared(rule_errors, 2):
        assert max(found) < 1e-11


def messages(rank: int) -> dict[str, str]:
    grid = Grid((2, 1))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1)

    def batch(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
        return lambda: spatialize(nn.Conv2d(2, 2, 3), grid)(torch.zeros(shape, dtype=dtype))

    first, compiled = rank == 0, nn.Sequential(nn.ReLU())
    compiled[0].compile()
    cases: dict[str, Callable[[], Any]] = {
        "ranks": lambda: Grid((2, 2)),
        "voxels": lambda: grid.shard(torch.zeros(1, 1, 1, 5)),
        "compiled module": lambda: spatialize(compiled, grid),
        "nested module": lambda: spatialize(nn.Sequential(nn.ReLU(), Block()), grid),
        "samples": batch(2 if first else 3, 2, 4, 6),
        "sizes": batch(2, 2, 4 if first else 2, 6),
        "number of dimensions": batch(*((2, 2, 4, 6) if first else (2, 2, 1, 4, 6))),
        "dtype": batch(2, 2, 4, 6, dtype=torch.float16 if first else torch.bfloat16),
        "gradient": lambda: spatialize(nn.ReLU(), grid)(
            torch.zeros(2, 2, 4, 6, requires_grad=first)
        ),
        "gathered": lambda: grid.gather(torch.zeros(2, 2, 4 if first else 6, 5)),
    }
    found = {}
    for name, call in cases.items():
        with pytest.raises(ConfigError) as error:
            call()
        found[name] = str(error.value)
    return found


NAMED = {
    "ranks": "2 x 2 needs 4 ranks",
    "nested module": "1.attention (MultiheadAttention)",
    "samples": "rank 0: float32 [2, 2, 4, 6]; rank 1: float32 [3, 2, 4, 6]",
    "dtype": "rank 0: float16 [2, 2, 4, 6]; rank 1: bfloat16 [2, 2, 4, 6]",
    "gradient": "rank 0: float32 [2, 2, 4, 6] that requires a gradient; rank 1: float32 [",
}


def test_bad_input_is_refused_on_every_rank_with_a_remedy() -> None:
    for found in run_shared(messages, 2):
        assert all("remedy: " in text for text in found.values())
        assert {name: found[name] for name, text in NAMED.items() if text not in found[name]} == {}


def group_error(rank: int) -> str:
    group = dist.new_group([0])
    try:
        Grid((1, 1), group)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rank_outside_of_the_group_is_refused() -> None:
    first, second = run_shared(group_error, 2)
    assert first == ""
    assert "rank 1 is not in the process group" in second


TIMEOUT_S = 4.0


def step_without_one(rank: int, when: str, at: int, signum: int) -> tuple[str, float]:
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    grid = Grid((1, 1, 3))
    model = spatialize(UNet() if when == "norm" else chain(3), grid)
    x = grid.shard(torch.randn(1, 2, 4, 4, 12)).clone().requires_grad_()
    model(x).sum().backward()
    start, calls = grid_module.start_messages, iter(range(1000))

    def ending(*arguments: Any, **more: Any) -> Any:
        if rank == 1 and next(calls) == at:
            os.kill(os.getpid(), signum)
        return start(*arguments, **more)

    began_s = time.monotonic()
    try:
        if when != "backward":
            grid_module.start_messages = ending
        output = model(x).sum()
        grid_module.start_messages = ending
        output.backward()
    except TransportError as error:
        return str(error), time.monotonic() - began_s
    return "", 0.0


@pytest.mark.parametrize(
    ("when", "at", "signum"),
    [
        ("forward", 1, signal.SIGKILL),
        ("backward", 2, signal.SIGKILL),
        ("norm", 0, signal.SIGKILL),
        ("forward", 1, signal.SIGSTOP),
    ],
)
def test_a_rank_that_ends_in_an_exchange_is_named(when: str, at: int, signum: int) -> None:
    found = outcomes(
        step_without_one, 3, when, at, signum, awaited=[0, 2], join_group=False, limit_s=90.0
    )
    for outcome in (found[0], found[2]):
        assert outcome.error is None, outcome
        message, taken_s = outcome.value
        assert message, "no error"
        assert "remedy: " in message
        assert taken_s < TIMEOUT_S + 30.0  # and the store's own limits on a busy machine
    assert any("rank 1" in outcome.value[0] for outcome in (found[0], found[2]))
