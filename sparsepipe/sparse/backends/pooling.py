"""Max-pooling over the windows of a kernel map, with its gradient.

Shape suffixes: N input sites, M output sites, K offsets, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsepipe.sparse.kernel_map import KernelMap
from sparsepipe.sparse.kernel_spec import KernelSpec


def max_pool(feats_NC: Tensor, kernel_map: KernelMap) -> Tensor:
    """Largest input of each window, [M, C]; gradient to the first largest input."""
    out: Tensor = _MaxPool.apply(feats_NC, kernel_map)  # type: ignore[no-untyped-call]
    return out


def _scan_order(spec: KernelSpec) -> list[int]:
    """Offsets as a dense pooling scans them, z fastest (ours count x fastest)."""
    sx, sy, sz = spec.size
    return [(z * sy + y) * sx + x for x in range(sx) for y in range(sy) for z in range(sz)]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_map: KernelMap) -> Tensor:
        padded = torch.cat([feats_NC, feats_NC.new_full((1, feats_NC.shape[1]), -torch.inf)])
        rows_KM = torch.where(
            kernel_map.neighbours_KM < 0, feats_NC.shape[0], kernel_map.neighbours_KM
        )
        order = _scan_order(kernel_map.spec)
        best = padded.index_select(0, rows_KM[order[0]])
        winner = torch.zeros_like(best, dtype=torch.uint8)
        for k in order[1:]:
            other = padded.index_select(0, rows_KM[k])
            winner.masked_fill_(other > best, k)
            torch.maximum(best, other, out=best)
        ctx.save_for_backward(winner)
        ctx.kernel_map = kernel_map
        return best

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:
        (winner,) = ctx.saved_tensors
        kernel_map: KernelMap = ctx.kernel_map
        if kernel_map.parent_N is not None:
            assert kernel_map.offset_N is not None
            own = winner.index_select(0, kernel_map.parent_N) == kernel_map.offset_N[:, None]
            return grad_MC.index_select(0, kernel_map.parent_N) * own, None
        readers_KN = kernel_map.readers_KN if grad_MC.shape[0] else ()
        grad = grad_MC.new_zeros(kernel_map.num_inputs, grad_MC.shape[1])
        for k in range(len(readers_KN)):
            exists = readers_KN[k] >= 0
            rows = readers_KN[k].clamp(min=0)
            own = (winner.index_select(0, rows) == k) & exists[:, None]
            grad += grad_MC.index_select(0, rows) * own
        return grad, None
