"""The losses of domain separation, by their definitions and by other programs' functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sparsepipe.models import DomainLosses
from sparsepipe.models.domain_losses import MMD_WIDTHS, difference, mmd, si_mse


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scale_invariant_error_by_pairs() -> None:
    """It is half of the mean over all pairs of numbers of how their differences differ."""
    output, target = drawn(2, 5), drawn(2, 5, seed=1)
    error = output - target
    pairs = (error[:, :, None] - error[:, None]).square().mean((1, 2)) / 2
    assert torch.allclose(si_mse(output, target), pairs, rtol=1e-12)


def test_difference_by_loops() -> None:
    shared, private = drawn(6, 3), drawn(6, 3, seed=1)

    def prepared(codes: Tensor) -> list[list[float]]:
        mean = [sum(row[c] for row in codes.tolist()) / len(codes) for c in range(3)]
        rows = [[value - mean[c] for c, value in enumerate(row)] for row in codes.tolist()]
        return [[value / math.hypot(*row) for value in row] for row in rows]

    first, second = prepared(shared), prepared(private)
    total = sum(
        sum(a[i] * b[j] for a, b in zip(first, second, strict=True)) ** 2
        for i in range(3)
        for j in range(3)
    )
    assert float(difference(shared, private)) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_discrepancy_by_loops(unbiased: bool) -> None:
    first, second = drawn(4, 3), drawn(5, 3, seed=1) + 0.5

    def kernel(x: list[float], y: list[float]) -> float:
        return sum(math.exp(-(math.dist(x, y) ** 2) / (2 * width)) for width in MMD_WIDTHS)

    def mean(a: Tensor, b: Tensor, *, own: bool) -> float:
        found = [
            kernel(x, y)
            for i, x in enumerate(a.tolist())
            for j, y in enumerate(b.tolist())
            if own or i != j
        ]
        return sum(found) / len(found)

    expected = sum(mean(codes, codes, own=not unbiased) for codes in (first, second))
    expected -= 2 * mean(first, second, own=True)
    assert float(mmd(first, second, unbiased=unbiased)) == pytest.approx(expected, rel=1e-12)
    assert len(MMD_WIDTHS) == 19
    assert (min(MMD_WIDTHS), max(MMD_WIDTHS)) == (1e-6, 1e6)


def test_discrepancy_of_equal_samples() -> None:
    codes = drawn(7, 3)
    assert float(mmd(codes, codes)) == pytest.approx(0, abs=1e-12)
    alike = [
        float(mmd(drawn(9, 3, seed=2 * n), drawn(9, 3, seed=2 * n + 1), unbiased=True))
        for n in range(400)
    ]
    mean = sum(alike) / len(alike)
    deviation = torch.tensor(alike).std() / 20
    assert abs(mean) < 4 * deviation, "its expectation is 0 for equal distributions"


def test_gradients() -> None:
    """Of all losses, by finite differences."""
    first, second = drawn(4, 3).requires_grad_(), drawn(4, 3, seed=1).requires_grad_()
    for loss in (mmd, difference, lambda a, b: si_mse(a, b).mean()):
        assert torch.autograd.gradcheck(loss, (first, second))


def test_a_discriminator_learns_what_codes_are_kept_from() -> None:
    """Its gradient is that of the cross-entropy, the gradient of the codes is reversed."""
    weight = drawn(3, 5).requires_grad_()
    codes = [drawn(2, 5, seed=n).requires_grad_() for n in range(3)]
    losses = DomainLosses(similarity="dann")
    losses.dissimilarity(codes, lambda x: F.linear(x, weight)).backward()
    plain = [each.detach().clone().requires_grad_() for each in codes]
    other = weight.detach().clone().requires_grad_()
    label = torch.tensor([0, 0, 1, 1, 2, 2])
    F.cross_entropy(F.linear(torch.cat(plain), other), label).backward()
    assert torch.allclose(weight.grad, other.grad, rtol=1e-12)
    for mine, theirs in zip(codes, plain, strict=True):
        assert torch.allclose(mine.grad, -theirs.grad, rtol=1e-12)
