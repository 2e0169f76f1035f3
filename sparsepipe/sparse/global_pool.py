"""From a sparse batch to one vector per sample.

Shape suffixes: N sites, B samples, L largest number of sites in a sample, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.sparse.saving import save, saved
from sparsepipe.sparse.tensor import SparseTensor


class GlobalMaxPool(nn.Module):
    """Largest feature of each sample, [B, C]; zeros for a sample without sites.

    The gradient goes to the first row that holds the maximum.
    """

    def forward(self, x: SparseTensor) -> Tensor:
        """Pool each sample."""
        out: Tensor = _GlobalMax.apply(x.feats, *x.cache.samples())  # type: ignore[no-untyped-call]
        return out


class GlobalAvgPool(nn.Module):
    """Mean feature of each sample, [B, C]; zeros for a sample without sites."""

    def forward(self, x: SparseTensor) -> Tensor:
        """Pool each sample."""
        rows_BL, counts_B = x.cache.samples()
        out: Tensor = _GlobalMean.apply(x.feats, x.coords[:, 0], rows_BL, counts_B)  # type: ignore[no-untyped-call]
        return out


def _by_sample(feats_NC: Tensor, rows_BL: Tensor, padding: float) -> Tensor:
    padded = torch.cat([feats_NC, feats_NC.new_full((1, feats_NC.shape[1]), padding)])
    return padded.index_select(0, rows_BL.view(-1)).view(*rows_BL.shape, feats_NC.shape[1])


class _GlobalMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, rows_BL: Tensor, counts_B: Tensor) -> Tensor:
        batch, longest = rows_BL.shape
        ctx.num_rows = feats_NC.shape[0]
        if longest == 0:
            ctx.save_for_backward(rows_BL.new_empty(batch, feats_NC.shape[1]))
            return feats_NC.new_zeros(batch, feats_NC.shape[1])
        best, place_BC = _by_sample(feats_NC, rows_BL, -torch.inf).max(1)
        # Row N, one past the features, takes what belongs to samples without sites.
        ctx.save_for_backward(rows_BL.gather(1, place_BC))
        return best.masked_fill_(counts_B[:, None] == 0, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor, None, None]:
        (winner_BC,) = ctx.saved_tensors
        grad = grad_BC.new_zeros(ctx.num_rows + 1, grad_BC.shape[1])
        if ctx.num_rows:
            grad.scatter_(0, winner_BC, grad_BC)
        return grad[: ctx.num_rows], None, None


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, feats_NC: Tensor, batch_N: Tensor, rows_BL: Tensor, counts_B: Tensor
    ) -> Tensor:
        # Cached indices may be inference tensors, which cannot be saved for backward.
        save(ctx, derived=(batch_N, counts_B))
        total_BC = _by_sample(feats_NC, rows_BL, 0.0).sum(1)
        return total_BC / counts_B.clamp(min=1)[:, None].to(total_BC.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor, None, None, None]:
        _, (batch_N, counts_B) = saved(ctx)
        share_BC = grad_BC / counts_B.clamp(min=1)[:, None].to(grad_BC.dtype)
        return share_BC.index_select(0, batch_N), None, None, None
