"""Replicas of a stage as real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsepipe.runtime.collectives.replicas import Replicas
from tests.support.processes import run_shared

SHAPES = {"a": (7, 5), "b": (3,), "c": (), "d": (2, 3, 4, 4), "e": (0, 3)}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    made = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    made["d"] = made["d"].contiguous(memory_format=torch.channels_last)
    return {name: nn.Parameter(tensor) for name, tensor in made.items()}


def gradient(rank: int, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def mean(ranks: list[int], name: str) -> Tensor:
    return torch.stack([gradient(rank, name).double() for rank in ranks]).mean(0)


def averaged(rank: int, counts: list[int], without: dict[str, list[int]]) -> dict[str, Any]:
    """Averages two times; ``without`` names ranks that have no gradient of a parameter."""
    replicas = Replicas(dist.group.WORLD, parameters())
    mine: dict[str, Tensor | None] = {
        name: None if rank in without.get(name, []) else gradient(rank, name) for name in SHAPES
    }
    found = []
    for _ in range(2):
        result = replicas.average(mine if counts[rank] else {}, minibatches=counts[rank])
        found.append({n: None if g is None else g.clone() for n, g in result.items()})
    assert all((found[0][n] is None) == (g is None) for n, g in found[1].items())
    assert all(g is None or torch.equal(g, found[1][n]) for n, g in found[0].items())
    return found[0]


@pytest.mark.parametrize("counts", [[1, 1], [1, 0], [1, 1, 1], [1, 1, 0], [2, 1, 0]])
def test_gradients_are_the_mean_over_minibatches_with_the_same_bits(counts: list[int]) -> None:
    results = run_shared(averaged, len(counts), counts, {})
    for name in SHAPES:
        total = sum(n * gradient(rank, name).double() for rank, n in enumerate(counts))
        for result in results:
            assert torch.equal(result[name], results[0][name])
            torch.testing.assert_close(
                result[name].double(), total / sum(counts), rtol=1e-6, atol=1e-7
            )
            assert result[name].dtype == torch.float32
        assert results[0]["d"].is_contiguous(memory_format=torch.channels_last)


def test_all_agree_which_parameters_have_no_gradient() -> None:
    results = run_shared(averaged, 3, [1, 1, 1], {"a": [0, 1, 2], "b": [1], "d": [0, 2]})
    for result in results:
        assert result["a"] is None
        for name, others in [("b", [0, 2]), ("d", [1]), ("c", [0, 1, 2])]:
            expected = mean(others, name) * len(others) / 3
            torch.testing.assert_close(result[name].double(), expected, rtol=1e-6, atol=1e-7)


def in_part_of_the_world(rank: int) -> Any:
    stage = dist.new_group([1, 2])  # all ranks make it
    if rank == 0:
        return None
    replicas = Replicas(stage, parameters(torch.bfloat16))
    mine = {name: gradient(rank, name, torch.bfloat16) for name in SHAPES}
    return replicas.count, dict(replicas.average(mine))


def test_a_stage_of_a_larger_world_and_16_bits() -> None:
    _, (count, found), (_, other) = run_shared(in_part_of_the_world, 3)
    assert count == 2
    for name in SHAPES:
        pair = [gradient(rank, name, torch.bfloat16).float() for rank in (1, 2)]
        expected = ((pair[0] + pair[1]) / 2).bfloat16()  # rounded once
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], expected)
        assert torch.equal(other[name], expected)


def statistics(rank: int) -> dict[str, Tensor]:
    norm = nn.BatchNorm1d(4)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(rank + 1):
        norm(torch.randn(8, 4, generator=generator))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    constant = torch.tensor([0.1, 1 / 3, -7e-9, float("inf")])
    flag = torch.tensor([rank == 1, False])
    replicas = Replicas(dist.group.WORLD, dict(norm.named_parameters()))
    replicas.average_statistics_([*norm.buffers(), constant, flag])
    after = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    return {"before": before, "after": after, "constant": constant, "flag": flag}


def test_running_statistics_become_their_mean_and_counters_the_largest() -> None:
    results = run_shared(statistics, 3)
    for name in ("running_mean", "running_var"):
        expected = torch.stack([result["before"][name].double() for result in results]).mean(0)
        for result in results:
            assert torch.equal(result["after"][name], expected.float())
    for result in results:
        assert result["after"]["num_batches_tracked"] == 3
        assert torch.equal(result["constant"], torch.tensor([0.1, 1 / 3, -7e-9, float("inf")]))
        assert result["flag"].tolist() == [True, False]


def trained(rank: int, size: int) -> dict[str, Tensor]:
    network, optimizer = net()
    replicas = Replicas(dist.group.WORLD, dict(network.named_parameters()))
    for step in range(4):
        minibatch = step * size + rank
        mine = local_gradients(network, minibatch) if minibatch < 11 else {}
        found = replicas.average(mine, minibatches=int(minibatch < 11))
        for name, parameter in network.named_parameters():
            parameter.grad = found[name]
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in network.named_parameters()}


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def local_gradients(network: nn.Module, minibatch: int) -> dict[str, Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(minibatch))
    grads = torch.autograd.grad(network(x).square().mean(), list(network.parameters()))
    return dict(zip((name for name, _ in network.named_parameters()), grads, strict=True))


def test_rounds_with_a_partial_last_one_train_as_larger_batches_do() -> None:
    """Eleven minibatches over three replicas: the last round has two."""
    results = run_shared(trained, 3, 3)
    network, optimizer = net()
    for first in range(0, 11, 3):
        x = [torch.randn(4, 6, generator=torch.Generator().manual_seed(m))
             for m in range(first, min(first + 3, 11))]  # fmt: skip
        network(torch.cat(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in network.named_parameters():
        for result in results:
            assert torch.equal(result[name], results[0][name])
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-5, atol=1e-6)
