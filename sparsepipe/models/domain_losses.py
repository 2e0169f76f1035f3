"""Losses of domain separation networks.

Source: Bousmalis, Trigeorgis, Silberman, Krishnan and Erhan, "Domain Separation Networks" (NIPS
2016), sections 3.1 to 3.3. Their sums over samples are means here, as in their code, so that
the weights of the losses do not depend on the batch size.

Shapes: B samples, C values of a code, N + 1 domains, of which the first is the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsepipe.models.chain import require

Similarity = Literal["dann", "mmd", "mmd_unbiased", "none"]
Reconstruction = Literal["si_mse", "mse"]

MMD_WIDTHS = (
    *(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
    *(1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0),
    *(1e2, 1e3, 1e4, 1e5, 1e6),
)
"""The 19 widths of the kernels that :func:`mmd` adds up."""


def si_mse(output: Tensor, target: Tensor) -> Tensor:
    """Returns the scale-invariant mean squared error [B] of samples [B, ...]; eq. 5.

    For a sample of k values with errors e it is ``||e||^2 / k - (sum e)^2 / k^2``: a constant added
    to all errors costs nothing.
    """
    error_BK = (output - target).flatten(1)
    return error_BK.square().mean(1) - error_BK.mean(1).square()


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean squared error [B] of samples [B, ...]."""
    return (output - target).flatten(1).square().mean(1)


RECONSTRUCTIONS: dict[Reconstruction, Callable[[Tensor, Tensor], Tensor]] = {
    "si_mse": si_mse,
    "mse": mse,
}


def difference(shared_BC: Tensor, private_BC: Tensor) -> Tensor:
    """Returns ``||Hs^T Hp||_F^2`` of one domain's shared codes Hs and private codes Hp; eq. 4.

    Codes are first centred over the samples, then each is scaled to length 1.
    """
    shared, private = (
        F.normalize(codes - codes.mean(0), dim=1) for codes in (shared_BC, private_BC)
    )
    return (shared.T @ private).square().sum()


def mmd(first_BC: Tensor, second_BC: Tensor, *, unbiased: bool = False) -> Tensor:
    """Returns the squared maximum mean discrepancy of two domains' codes; eqs. 7 and 8.

    The kernel is a sum over :data:`MMD_WIDTHS` of ``exp(-||x - y||^2 / (2 width))``.

    Args:
        first_BC: codes of one domain.
        second_BC: codes of another domain, with any number of samples.
        unbiased: whether to leave out pairs of a sample with itself (Gretton et al., "A Kernel
            Two-Sample Test", eq. 3), so that the result may be negative; else eq. 7's estimate.
    """

    def mean_kernel(one_BC: Tensor, other_BC: Tensor, *, without_own: bool) -> Tensor:
        squares = (one_BC[:, None] - other_BC[None]).square().sum(2)
        kernel = torch.stack([torch.exp(squares / (-2 * width)) for width in MMD_WIDTHS]).sum(0)
        if not without_own:
            return kernel.mean()
        count = len(one_BC)
        return (kernel.sum() - kernel.diagonal().sum()) / max(count * (count - 1), 1)

    within = [mean_kernel(each, each, without_own=unbiased) for each in (first_BC, second_BC)]
    return within[0] + within[1] - 2 * mean_kernel(first_BC, second_BC, without_own=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainLosses:
    """Weights and kinds of the terms of eq. 4, the objective.

    Args:
        alpha: weight of the reconstruction.
        beta: weight of the difference of shared and private codes.
        gamma: weight of the similarity of domains.
        similarity: kind of :meth:`dissimilarity`; ``none`` leaves the term out.
        similarity_from: number of optimizer steps before the similarity counts (10,000 in the
            paper).
        reconstruction: ``si_mse``, as in the paper, or ``mse``.
    """

    alpha: float = 0.01
    beta: float = 0.05
    gamma: float = 0.25
    similarity: Similarity = "dann"
    similarity_from: int = 0
    reconstruction: Reconstruction = "si_mse"

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "similarity_from"):
            value = getattr(self, name)
            require(value >= 0, f"losses.{name}", value, "a number of at least 0")
        for name, choices in (("similarity", Similarity), ("reconstruction", Reconstruction)):
            value, valid = getattr(self, name), get_args(choices)
            require(value in valid, f"losses.{name}", value, f"one of {', '.join(valid)}")

    def dissimilarity(
        self, shared: Sequence[Tensor], discriminator: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns the similarity loss of the shared codes, [B, C] for each domain, source first.

        ``dann``: the cross-entropy of the discriminator's logits [B, N + 1], whose gradient is
        reversed for the codes; ``mmd``, ``mmd_unbiased``: mean :func:`mmd` of source and a target.
        """
        if self.similarity == "dann":
            codes_BC = torch.cat(list(shared))
            numbers = torch.arange(len(shared), device=codes_BC.device)
            counts = torch.tensor(list(map(len, shared)), device=codes_BC.device)
            # The gradient's sign is reversed (Ganin and Lempitsky, 2015): encoders learn to prevent
            # what the discriminator learns; section 3.3.
            if codes_BC.requires_grad:
                codes_BC.register_hook(torch.neg)  # type: ignore[no-untyped-call]
            logits_BD = discriminator(codes_BC)
            return F.cross_entropy(logits_BD, numbers.repeat_interleave(counts))
        unbiased = self.similarity == "mmd_unbiased"
        found = [mmd(shared[0], target, unbiased=unbiased) for target in shared[1:]]
        return torch.stack(found).mean()
