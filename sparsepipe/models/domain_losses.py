"""Losses of domain separation networks.

Source: Bousmalis, Trigeorgis, Silberman, Krishnan and Erhan, "Domain Separation Networks" (NIPS
2016), sections 3.1 to 3.3. Their sums over samples are means here, as in their own program, so that
weights do not depend on the size of a batch.

Shapes: B samples, C numbers of a code, N + 1 domains of which the first is the source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MMD_WIDTHS = (
    *(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
    *(1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0),
    *(1e2, 1e3, 1e4, 1e5, 1e6),
)
"""The 19 widths of the kernels that are added up for :func:`mmd`."""


def si_mse(output: Tensor, target: Tensor) -> Tensor:
    """Scale-invariant mean squared error [B] of each sample; eq. 5.

    With the error e of a sample of k numbers it is ``||e||^2 / k - (sum e)^2 / k^2``: a constant
    added to all of them costs nothing.
    """
    error_BK = (output - target).flatten(1)
    return error_BK.square().mean(1) - error_BK.mean(1).square()


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error [B] of each sample."""
    return (output - target).flatten(1).square().mean(1)


RECONSTRUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"si_mse": si_mse, "mse": mse}


def difference(shared_BC: Tensor, private_BC: Tensor) -> Tensor:
    """The squared Frobenius norm ``||Hs^T Hp||_F^2`` of one domain's codes; a term of eq. 4.

    Codes are centred over the samples and then have norm 1 each. It is 0 where no feature of the
    shared codes is correlated with one of the private codes.
    """
    shared, private = (
        F.normalize(codes - codes.mean(0), dim=1) for codes in (shared_BC, private_BC)
    )
    return (shared.T @ private).square().sum()


def mmd(first_BC: Tensor, second_BC: Tensor, *, unbiased: bool = False) -> Tensor:
    """Squared maximum mean discrepancy of two domains' codes; eqs. 7 and 8.

    The kernel is a sum over :data:`MMD_WIDTHS` of ``exp(-||x - y||^2 / (2 width))``.

    Args:
        first_BC: codes of one domain.
        second_BC: of another, of as many samples or another number.
        unbiased: leave out pairs of a sample with itself (Gretton et al., "A Kernel Two-Sample
            Test", eq. 3), so that the expectation is 0 for equal distributions and values may be
            negative; otherwise the biased estimate of eq. 7.
    """
    within = [_mean_kernel(codes, codes, unbiased) for codes in (first_BC, second_BC)]
    return within[0] + within[1] - 2 * _mean_kernel(first_BC, second_BC, False)


def _mean_kernel(first_BC: Tensor, second_BC: Tensor, without_own: bool) -> Tensor:
    squares = (first_BC[:, None] - second_BC[None]).square().sum(2)
    kernel = torch.stack([torch.exp(squares / (-2 * width)) for width in MMD_WIDTHS]).sum(0)
    if not without_own:
        return kernel.mean()
    count = len(first_BC)
    return (kernel.sum() - kernel.diagonal().sum()) / max(count * (count - 1), 1)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def reversed_gradient(value: Tensor) -> Tensor:
    """The value, whose gradient has the opposite sign (Ganin and Lempitsky, 2015).

    What follows learns to tell the domains apart, what is before it learns to keep it from that:
    section 3.3.
    """
    result: Tensor = _Reversed.apply(value)  # type: ignore[no-untyped-call]
    return result
