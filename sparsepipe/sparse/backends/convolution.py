"""Sparse convolution over a gather plan, with its gradients.

Shape suffixes: N input sites, M output sites, K offsets, C input channels, D output
channels, P pairs of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsepipe.sparse.backends.workspace import workspace
from sparsepipe.sparse.gather_plan import Block, GatherPlan
from sparsepipe.sparse.kernel_map import KernelMap

# Up to this many input channels all offsets go into one product over [M, K * C]: it
# multiplies zeros, but products this thin are bound by memory, not by arithmetic.
_NARROW_CHANNELS = 4

_BLOCK_BYTES = 3_000_000
_PAIRS_PER_CHANNEL = 1.0
_MIN_BLOCK_ROWS = 256


def convolve(feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
    """Convolve; returns features [M, D] of the map's output level."""
    if feats_NC.shape[1] <= _NARROW_CHANNELS:
        out: Tensor = _NarrowConvolution.apply(feats_NC, kernel_KCD, kernel_map)  # type: ignore[no-untyped-call]
    else:
        out = _Convolution.apply(feats_NC, kernel_KCD, kernel_map)  # type: ignore[no-untyped-call]
    return out


def prepare(kernel_map: KernelMap, channels: int, width: int, dtype: torch.dtype) -> None:
    """Derive from the map now what a training step of such a convolution will use."""
    if channels <= _NARROW_CHANNELS:
        _ = kernel_map.neighbours_MK
    else:
        rows = _block_rows(kernel_map, max(channels, width), dtype)
        kernel_map.gather_plan(rows)
        kernel_map.scatter_plan(rows)


def _block_rows(kernel_map: KernelMap, channels: int, dtype: torch.dtype) -> int:
    """Rows to a block: as many as fit the budget, but enough to pay for the kernel.

    Every block reads the whole kernel, so a block that holds fewer pairs to an offset
    than there are channels moves more weights than features.
    """
    rows = max(1, kernel_map.num_outputs, kernel_map.num_inputs)
    if kernel_map.neighbours_KM.device.type != "cpu":
        return rows
    pairs_per_row = max(1.0, kernel_map.num_pairs / rows)
    pairs = max(
        _BLOCK_BYTES / (channels * dtype.itemsize),
        _PAIRS_PER_CHANNEL * channels * kernel_map.spec.volume,
    )
    blocks = max(1, round(rows * pairs_per_row / pairs))
    return min(rows, max(_MIN_BLOCK_ROWS, -(-rows // blocks)))


class _Convolution(torch.autograd.Function):
    """One product per offset on gathered rows, summed per output row."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
        ctx.save_for_backward(feats_NC, kernel_KCD)
        ctx.kernel_map = kernel_map
        block_rows = _block_rows(kernel_map, max(kernel_KCD.shape[1:]), feats_NC.dtype)
        plan = kernel_map.gather_plan(block_rows)
        return _sum_of_products(plan, feats_NC, kernel_KCD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        feats_NC, kernel_KCD = ctx.saved_tensors
        grads = _gradients(
            feats_NC,
            kernel_KCD,
            grad_MD.contiguous(),
            ctx.kernel_map,
            need_feats=ctx.needs_input_grad[0],
            need_kernel=ctx.needs_input_grad[1],
        )
        return (*grads, None)


class _NarrowConvolution(torch.autograd.Function):
    """One product over all offsets, for inputs of few channels."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
        volume, channels, width = kernel_KCD.shape
        padded = torch.cat([feats_NC, feats_NC.new_zeros(1, channels)])
        rows_MK = kernel_map.neighbours_MK
        columns = padded.index_select(0, rows_MK.view(-1)).view(-1, volume * channels)
        ctx.save_for_backward(feats_NC, kernel_KCD, columns)
        ctx.kernel_map = kernel_map
        return columns @ kernel_KCD.reshape(volume * channels, width)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        feats_NC, kernel_KCD, columns = ctx.saved_tensors
        grad_kernel = None
        if ctx.needs_input_grad[1]:
            grad_kernel = (columns.t() @ grad_MD).view(kernel_KCD.shape)
        grad_feats = None
        if ctx.needs_input_grad[0]:
            grad_feats, _ = _gradients(
                feats_NC,
                kernel_KCD,
                grad_MD.contiguous(),
                ctx.kernel_map,
                need_feats=True,
                need_kernel=False,
            )
        return grad_feats, grad_kernel, None


def _bag_sum(parts_PD: Tensor, block: Block) -> Tensor:
    """Sum each row's parts in a fixed order; rows without parts are zero."""
    out: Tensor = torch.ops.aten._embedding_bag_forward_only(
        parts_PD, block.bag_P, block.bag_starts
    )[0]
    return out


def _sum_of_products(plan: GatherPlan, source_SC: Tensor, kernel_KCD: Tensor) -> Tensor:
    """``out[r] = sum over pairs (r, s) at offset k of source[s] @ kernel[k]``."""
    out = source_SC.new_zeros(plan.num_rows, kernel_KCD.shape[2])
    kernels = kernel_KCD.unbind(0)
    for block in plan.blocks:
        gathered = _gather("gathered", source_SC, block.sources_P)
        parts = _products(gathered, kernels, block)
        out[block.first : block.last] = _bag_sum(parts, block)
    return out


def _gather(name: str, source: Tensor, rows_P: Tensor) -> Tensor:
    out = workspace.take(name, (rows_P.shape[0], source.shape[1]), source)
    return torch.index_select(source, 0, rows_P, out=out)


def _products(gathered_PC: Tensor, kernels: tuple[Tensor, ...], block: Block) -> Tensor:
    shape = gathered_PC.shape[0], kernels[0].shape[1]
    parts = workspace.take("parts", shape, gathered_PC)
    sections = zip(
        gathered_PC.split_with_sizes(block.counts),
        parts.split_with_sizes(block.counts),
        strict=True,
    )
    for kernel_CD, (section, part) in zip(kernels, sections, strict=True):
        if section.shape[0]:
            torch.mm(section, kernel_CD, out=part)
    return parts


def _gradients(
    feats_NC: Tensor,
    kernel_KCD: Tensor,
    grad_MD: Tensor,
    kernel_map: KernelMap,
    *,
    need_feats: bool,
    need_kernel: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients from one gathering of the output's gradient at the inputs."""
    block_rows = _block_rows(kernel_map, max(kernel_KCD.shape[1:]), feats_NC.dtype)
    plan = kernel_map.scatter_plan(block_rows)
    grad_feats = torch.zeros_like(feats_NC) if need_feats else None
    grad_kernel = torch.zeros_like(kernel_KCD) if need_kernel else None
    # A symmetric map's own plan lists the readers of offset k under K - 1 - k.
    reverse = kernel_map.spec.is_symmetric
    kernels = kernel_KCD.transpose(1, 2).unbind(0)
    kernels = kernels[::-1] if reverse else kernels
    slots = () if grad_kernel is None else grad_kernel.unbind(0)
    slots = slots[::-1] if reverse else slots
    for block in plan.blocks:
        gathered = _gather("gathered", grad_MD, block.sources_P)
        if grad_kernel is not None:
            rows = _gather("rows", feats_NC, block.rows_P)
            sections = zip(
                rows.split_with_sizes(block.counts),
                gathered.split_with_sizes(block.counts),
                strict=True,
            )
            for slot, (row, section) in zip(slots, sections, strict=True):
                if row.shape[0]:
                    slot.addmm_(row.t(), section)
        if grad_feats is not None:
            parts = _products(gathered, kernels, block)
            grad_feats[block.first : block.last] = _bag_sum(parts, block)
    return grad_feats, grad_kernel
