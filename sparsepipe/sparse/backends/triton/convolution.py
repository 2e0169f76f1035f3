"""Convolution by one kernel for each pass: masked implicit products over tiles of alike rows.

A program adds up, for a tile of output rows and a block of output channels, the products of
gathered input rows with the weights of the tile's offsets alone. Its loop has no branch, so that
the compiler loads operands ahead of the matrix instructions. Shape suffixes: N input rows, M output
rows, K offsets, C input channels, D output channels.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepipe.sparse.backends.convolution import differentiable_gradients
from sparsepipe.sparse.backends.triton.configurations import (
    configuration,
    is_upcast,
    precision,
)
from sparsepipe.sparse.backends.triton.narrow import MOST_CHANNELS, narrow, narrow_weights
from sparsepipe.sparse.backends.triton.tiles import input_tiles, output_tiles
from sparsepipe.sparse.backends.triton.weights import weight_gradient
from sparsepipe.sparse.kernel_map import KernelMap
from sparsepipe.sparse.saved_tensors import save, saved


class Convolution(torch.autograd.Function):
    """Features [M, D] of the output sites of a map, from features [N, C] and a kernel [K, C, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        feats_NC: Tensor,
        kernel_KCD: Tensor,
        bias_D: Tensor | None,
        kernel_map: KernelMap,
    ) -> Tensor:
        save(ctx, feats_NC, kernel_KCD, derived=kernel_map)  # copies would have no derivatives
        feats_NC = feats_NC.contiguous()
        if kernel_KCD.shape[1] <= MOST_CHANNELS:
            return narrow(feats_NC, kernel_KCD.contiguous(), bias_D, kernel_map)
        # In TF32, matrix instructions of sm 9.0 need the channels that they add up side by side.
        if kernel_KCD.dtype == torch.float32:
            kernel_KCD = kernel_KCD.transpose(1, 2).contiguous().transpose(1, 2)
        return add_products(feats_NC, kernel_KCD, bias_D, kernel_map, to="outputs")

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        (feats_NC, kernel_KCD), kernel_map = saved(ctx)
        need_feats, need_kernel, need_bias, _ = ctx.needs_input_grad
        grad_bias = grad_MD.sum(0) if need_bias else None
        if torch.is_grad_enabled():  # for a second derivative
            needs = ctx.needs_input_grad
            grads = differentiable_gradients(feats_NC, kernel_KCD, grad_MD, kernel_map, needs)
            return (*grads, grad_bias, None)
        grad_feats, grad_kernel, grad_MD = None, None, grad_MD.contiguous()
        if need_feats:
            weights_KDC = kernel_KCD.transpose(1, 2)
            grad_feats = add_products(grad_MD, weights_KDC, None, kernel_map, to="inputs")
        if need_kernel:
            gradient = weight_gradient
            if kernel_KCD.shape[1] <= MOST_CHANNELS:
                gradient = narrow_weights
            grad_kernel = gradient(feats_NC.contiguous(), grad_MD, kernel_KCD, kernel_map)
        return grad_feats, grad_kernel, grad_bias, None


def add_products(
    feats_NC: Tensor,
    kernel_KCD: Tensor,
    bias_D: Tensor | None,
    kernel_map: KernelMap,
    *,
    to: Literal["outputs", "inputs"],
) -> Tensor:
    """Returns features [M, D] of the output rows of a map, from features of its input rows, or the
    other way round; the kernel may have any strides.
    """
    volume, channels, width = kernel_KCD.shape
    rows = kernel_map.num_outputs if to == "outputs" else kernel_map.num_inputs
    out_MD = feats_NC.new_empty(rows, width)
    chosen = configuration(feats_NC, "pass", channels, width, rows)
    # The tiles of a symmetric window serve both ways, with offsets counted from the other end.
    is_mirrored = to == "inputs" and kernel_map.spec.is_symmetric
    find = output_tiles if to == "outputs" or is_mirrored else input_tiles
    tiles = find(kernel_map, chosen.rows)
    grid = (tiles.counts_T.shape[0], triton.cdiv(width, chosen.columns))
    _add_products[grid](
        feats_NC, kernel_KCD, bias_D, out_MD,
        tiles.order_M, tiles.counts_T, tiles.offsets_TK, tiles.sources_TKS,
        rows, *kernel_KCD.stride(),
        C=channels, D=width, K=volume, IS_MIRRORED=is_mirrored, HAS_BIAS=bias_D is not None,
        PRECISION=precision(), IS_UPCAST=is_upcast(feats_NC),
        BM=chosen.rows, BC=chosen.reduced, BD=chosen.columns,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return out_MD


@triton.jit(do_not_specialize=["M"])
def _add_products(
    feats_ptr, kernel_ptr, bias_ptr, out_ptr, order_ptr, counts_ptr, offsets_ptr, sources_ptr,
    M, stride_k, stride_c, stride_d,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, IS_MIRRORED: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, IS_UPCAST: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    parts: tl.constexpr = (C + BC - 1) // BC
    total = tl.zeros((BM, BD), tl.float32)
    # One loop over offsets and blocks of channels: a nested one would drain at every offset.
    for step in range(0, tl.load(counts_ptr + tile) * parts):
        place = tile * K + step // parts
        k = tl.load(offsets_ptr + place)
        if IS_MIRRORED:
            k = K - 1 - k
        source = tl.load(sources_ptr + place * BM + lane)
        c = (step % parts) * BC + tl.arange(0, BC)
        read = tl.load(
            feats_ptr + source[:, None].to(tl.int64) * C + c[None, :],
            mask=(source >= 0)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        weights = tl.load(
            kernel_ptr + k.to(tl.int64) * stride_k + c[:, None] * stride_c + d[None, :] * stride_d,
            mask=(c < C)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if IS_UPCAST:
            read, weights = read.to(tl.float32), weights.to(tl.float32)
        total = tl.dot(read, weights, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    is_row = tile * BM + lane < M
    row = tl.load(order_ptr + tile * BM + lane, mask=is_row, other=0)
    out = out_ptr + row[:, None].to(tl.int64) * D + d[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (d < D)[None, :])
