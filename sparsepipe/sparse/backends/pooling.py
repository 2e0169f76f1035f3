"""Max-pooling over the windows of a kernel map, with its gradient.

Shape suffixes: N input sites, M output sites, K offsets, C channels, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsepipe.sparse.kernel_map import KernelMap
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.saved_tensors import save, saved


@dataclass(frozen=True, slots=True)
class Round:
    """The pairs of all windows that have an ``n``-th input, one for each such window.

    Attributes:
        outputs_P: int64, the output row; each at most once.
        inputs_P: int32, the input row.
        offsets_P1: int16 [P, 1], the kernel offset of the pair.
    """

    outputs_P: Tensor
    inputs_P: Tensor
    offsets_P1: Tensor


def max_pool(feats_NC: Tensor, kernel_map: KernelMap) -> Tensor:
    """Largest input of each window, [M, C]; gradient to the first largest input."""
    if kernel_map.num_outputs == 0:
        return feats_NC.sum(0).expand(0, -1)
    out: Tensor = _MaxPool.apply(feats_NC, kernel_map)  # type: ignore[no-untyped-call]
    return out


def build_rounds(kernel_map: KernelMap) -> list[Round]:
    """Sort the pairs by their place in their window, in the order of a dense pooling.

    Most windows on a surface hold one or two inputs, so few rounds are long.
    """
    order = torch.tensor(_scan_order(kernel_map.spec), device=kernel_map.neighbours_KM.device)
    rows_MK = kernel_map.neighbours_KM.index_select(0, order).t().contiguous()
    exists_MK = rows_MK >= 0
    outputs_P, places_P = exists_MK.nonzero().unbind(1)
    inputs_P = rows_MK[exists_MK]
    counts_M = exists_MK.sum(1)
    starts_M = counts_M.cumsum(0) - counts_M
    round_P = torch.arange(len(outputs_P), device=order.device) - starts_M[outputs_P]
    by_round_P = torch.argsort(round_P.short(), stable=True)
    sizes: list[int] = torch.bincount(round_P).tolist()
    columns = (outputs_P, inputs_P, order[places_P].short()[:, None])
    sections = (column[by_round_P].split_with_sizes(sizes) for column in columns)
    return [Round(*section) for section in zip(*sections, strict=True)]


def _scan_order(spec: KernelSpec) -> list[int]:
    """Offsets as a dense pooling scans them, z fastest (ours count x fastest)."""
    sx, sy, sz = spec.size
    return [(z * sy + y) * sx + x for x in range(sx) for y in range(sy) for z in range(sz)]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_map: KernelMap) -> Tensor:
        # Every output has an input, so the first round covers them all, in order.
        first, *others = kernel_map.derived("rounds", build_rounds)
        best_MC = feats_NC.index_select(0, first.inputs_P)
        winner_MC = first.offsets_P1.expand(best_MC.shape).contiguous()
        for later in others:
            known_PC = best_MC.index_select(0, later.outputs_P)
            other_PC = feats_NC.index_select(0, later.inputs_P)
            winner_PC = winner_MC.index_select(0, later.outputs_P)
            winner_PC = torch.where(other_PC > known_PC, later.offsets_P1, winner_PC)
            winner_MC.index_copy_(0, later.outputs_P, winner_PC)
            best_MC.index_copy_(0, later.outputs_P, torch.maximum(other_PC, known_PC))
        save(ctx, winner_MC, derived=kernel_map)
        return best_MC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:
        kernel_map: KernelMap
        (winner_MC,), kernel_map = saved(ctx)
        if kernel_map.parent_N is not None and kernel_map.offset_N is not None:
            own_NC = winner_MC.index_select(0, kernel_map.parent_N)
            own_NC = own_NC == kernel_map.offset_N.short()[:, None]
            return grad_MC.index_select(0, kernel_map.parent_N).mul_(own_NC), None
        return _overlapping_gradient(grad_MC, winner_MC, kernel_map), None


def _overlapping_gradient(grad_MC: Tensor, winner_MC: Tensor, kernel_map: KernelMap) -> Tensor:
    """Each input sums, offset by offset, what the windows that it won pass back."""
    grad_NC = grad_MC.new_zeros(kernel_map.num_inputs, grad_MC.shape[1])
    for k, (outputs_P, inputs_P) in enumerate(kernel_map.derived("pairs", pairs_by_offset)):
        won_PC = winner_MC.index_select(0, outputs_P) == k
        passed_PC = grad_MC.index_select(0, outputs_P).mul_(won_PC)
        # At one offset an input is read at most once: this adds without collisions.
        grad_NC.index_copy_(0, inputs_P, passed_PC.add_(grad_NC.index_select(0, inputs_P)))
    return grad_NC


def pairs_by_offset(kernel_map: KernelMap) -> list[tuple[Tensor, Tensor]]:
    """Output and input rows (int64) of the pairs at each offset."""
    rows_KM = kernel_map.neighbours_KM
    exists_KM = rows_KM >= 0
    sizes: list[int] = exists_KM.sum(1).tolist()
    outputs = exists_KM.nonzero()[:, 1].split_with_sizes(sizes)
    inputs = rows_KM[exists_KM].long().split_with_sizes(sizes)
    return list(zip(outputs, inputs, strict=True))
