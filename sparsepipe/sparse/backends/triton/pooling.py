"""Pooling of windows and of whole samples, by one kernel for each pass.

Shape suffixes: N input rows, M output rows, K offsets, B samples, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepipe.sparse.backends.convolution import pairs_by_offset
from sparsepipe.sparse.backends.native import max_pool_gradient
from sparsepipe.sparse.backends.triton.tiles import input_rows
from sparsepipe.sparse.kernel_map import KernelMap
from sparsepipe.sparse.saved_tensors import save, saved

_ROWS, _CHANNELS = 64, 64


class MaxPool(torch.autograd.Function):
    """Largest input of each window, [M, C]; the gradient goes to the first in (x, y, z) order."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_map: KernelMap) -> Tensor:
        feats_NC, rows_KM = feats_NC.contiguous(), kernel_map.neighbours_KM
        count, channels = rows_KM.shape[1], feats_NC.shape[1]
        best_MC = feats_NC.new_empty(count, channels)
        winner_MC = feats_NC.new_empty(count, channels, dtype=torch.int8)
        grid = (triton.cdiv(count, _ROWS), triton.cdiv(channels, _CHANNELS))
        _pool[grid](
            feats_NC, rows_KM, best_MC, winner_MC, count, rows_KM.stride(0),
            C=channels, SX=kernel_map.spec.size[0], SY=kernel_map.spec.size[1],
            SZ=kernel_map.spec.size[2], BM=_ROWS, BC=_CHANNELS,
        )  # fmt: skip
        save(ctx, winner_MC, derived=kernel_map)
        return best_MC

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:
        (winner_MC,), kernel_map = saved(ctx)
        if torch.is_grad_enabled():  # for a second derivative
            return max_pool_gradient(winner_MC, grad_MC, kernel_map), None
        rows_KN, channels = input_rows(kernel_map).sources_KM, grad_MC.shape[1]
        volume, count = rows_KN.shape
        grad_NC = grad_MC.new_empty(count, channels)
        grid = (triton.cdiv(count, _ROWS), triton.cdiv(channels, _CHANNELS))
        _pool_backward[grid](
            grad_MC.contiguous(), winner_MC, rows_KN, grad_NC, count, rows_KN.stride(0),
            C=channels, K=volume, BM=_ROWS, BC=_CHANNELS,
        )  # fmt: skip
        return grad_NC, None


class AveragePool(torch.autograd.Function):
    """Mean of the inputs of each window, [M, C]."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_map: KernelMap) -> Tensor:
        counts_M = feats_NC.new_empty(kernel_map.num_outputs, dtype=torch.int32)
        save(ctx, counts_M, derived=kernel_map)
        return _average_rows(feats_NC, kernel_map.neighbours_KM, counts_M, is_backward=False)

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:
        (counts_M,), kernel_map = saved(ctx)
        if torch.is_grad_enabled():  # for a second derivative
            share_MC = grad_MC / counts_M[:, None]
            grad_NC = grad_MC.new_zeros(kernel_map.num_inputs, grad_MC.shape[1])
            for outputs_P, inputs_P in kernel_map.derived("pairs", pairs_by_offset):
                grad_NC = grad_NC.index_add(0, inputs_P, share_MC.index_select(0, outputs_P))
            return grad_NC, None
        readers_KN = input_rows(kernel_map).sources_KM
        return _average_rows(grad_MC, readers_KN, counts_M, is_backward=True), None


def _average_rows(
    feats_NC: Tensor, rows_KM: Tensor, counts: Tensor, *, is_backward: bool
) -> Tensor:
    """Adds up what rows read, divided by ``counts``: the number of sources of each, which is
    written there, or in the backward pass by those of what is read.
    """
    (volume, rows), channels = rows_KM.shape, feats_NC.shape[1]
    out_MC = feats_NC.new_empty(rows, channels)
    _average[(triton.cdiv(rows, _ROWS), triton.cdiv(channels, _CHANNELS))](
        feats_NC.contiguous(), rows_KM, counts, out_MC, rows, rows_KM.stride(0),
        C=channels, K=volume, IS_BACKWARD=is_backward, BM=_ROWS, BC=_CHANNELS,
    )  # fmt: skip
    return out_MC


class GlobalPool(torch.autograd.Function):
    """Largest or mean features of each sample, [B, C], whose rows follow each other; 0 without any.

    The gradient of the largest goes to the first row that has it.
    """

    @staticmethod
    def forward(
        ctx: Any, feats_NC: Tensor, coords_N4: Tensor, batch_size: int, takes_largest: bool
    ) -> Tensor:
        count, channels = feats_NC.shape
        out_BC = feats_NC.new_empty(batch_size, channels)
        # The row of the largest, or the number of rows.
        notes_BC = coords_N4.new_empty(batch_size, channels)
        _pool_samples[(batch_size, triton.cdiv(channels, _CHANNELS))](
            feats_NC.contiguous(), coords_N4, out_BC, notes_BC, count, count.bit_length(),
            C=channels, TAKES_LARGEST=takes_largest, BM=_ROWS // 2, BC=_CHANNELS,
        )  # fmt: skip
        ctx.takes_largest = takes_largest
        save(ctx, notes_BC, derived=coords_N4)
        return out_BC

    @staticmethod
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor | None, ...]:
        (notes_BC,), coords_N4 = saved(ctx)
        count, channels = coords_N4.shape[0], grad_BC.shape[1]
        if torch.is_grad_enabled():  # for a second derivative
            batch_N, row_N = coords_N4[:, 0].long(), torch.arange(count, device=grad_BC.device)
            notes_NC, grad_NC = notes_BC[batch_N], grad_BC[batch_N]
            if ctx.takes_largest:
                return grad_NC * (notes_NC == row_N[:, None]), None, None, None
            return grad_NC / notes_NC, None, None, None
        grad_NC = grad_BC.new_empty(count, channels)
        _pool_samples_backward[(triton.cdiv(count, _ROWS), triton.cdiv(channels, _CHANNELS))](
            grad_BC.contiguous(), coords_N4, notes_BC, grad_NC, count,
            C=channels, TAKES_LARGEST=ctx.takes_largest, BM=_ROWS, BC=_CHANNELS,
        )  # fmt: skip
        return grad_NC, None, None, None


@triton.jit(do_not_specialize=["M", "stride"])
def _pool(
    feats_ptr, rows_ptr, best_ptr, winner_ptr, M, stride,
    C: tl.constexpr, SX: tl.constexpr, SY: tl.constexpr, SZ: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    is_place = (row < M)[:, None] & (c < C)[None, :]
    best = tl.full((BM, BC), float("-inf"), tl.float32)
    winner = tl.full((BM, BC), -1, tl.int32)
    for place in range(SX * SY * SZ):  # offsets with x fastest, visited with z fastest
        x, y, z = place // (SY * SZ), place // SZ % SY, place % SZ
        k = (z * SY + y) * SX + x
        source = tl.load(rows_ptr + tl.cast(stride, tl.int64) * k + row, mask=row < M, other=-1)
        has = is_place & (source >= 0)[:, None]
        read = tl.load(
            feats_ptr + source[:, None].to(tl.int64) * C + c[None, :], mask=has, other=0.0
        ).to(tl.float32)
        # NaN wins as in PyTorch; the first input does even where it is -inf.
        wins = has & ((read > best) | (winner < 0) | ((read != read) & (best == best)))
        best = tl.where(wins, read, best)
        winner = tl.where(wins, k, winner)
    out = row[:, None].to(tl.int64) * C + c[None, :]
    tl.store(best_ptr + out, best.to(best_ptr.dtype.element_ty), mask=is_place)
    tl.store(winner_ptr + out, winner.to(tl.int8), mask=is_place)


@triton.jit(do_not_specialize=["N", "stride"])
def _pool_backward(
    grad_ptr, winner_ptr, rows_ptr, out_ptr, N, stride,
    C: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    is_place = (row < N)[:, None] & (c < C)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    for k in range(K):
        reader = tl.load(rows_ptr + tl.cast(stride, tl.int64) * k + row, mask=row < N, other=-1)
        has = is_place & (reader >= 0)[:, None]
        place = reader[:, None].to(tl.int64) * C + c[None, :]
        winner = tl.load(winner_ptr + place, mask=has, other=-1).to(tl.int32)
        total += tl.load(grad_ptr + place, mask=has & (winner == k), other=0.0).to(tl.float32)
    out = out_ptr + row[:, None].to(tl.int64) * C + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["M", "stride"])
def _average(
    feats_ptr, rows_ptr, counts_ptr, out_ptr, M, stride,
    C: tl.constexpr, K: tl.constexpr, IS_BACKWARD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BM, BC), tl.float32)
    count = tl.zeros([BM], tl.int32)
    for k in range(K):
        source = tl.load(rows_ptr + tl.cast(stride, tl.int64) * k + row, mask=row < M, other=-1)
        has = source >= 0
        place = source[:, None].to(tl.int64) * C + c[None, :]
        read = tl.load(feats_ptr + place, mask=has[:, None] & (c < C)[None, :], other=0.0)
        read = read.to(tl.float32)
        if IS_BACKWARD:
            read = read / tl.load(counts_ptr + source, mask=has, other=1)[:, None].to(tl.float32)
        total += read
        count += has.to(tl.int32)
    if not IS_BACKWARD:
        total = total / tl.maximum(count, 1)[:, None].to(tl.float32)
        tl.store(counts_ptr + row, count, mask=(row < M) & (tl.program_id(1) == 0))
    out = out_ptr + row[:, None].to(tl.int64) * C + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (c < C)[None, :])


@triton.jit
def _first_row(coords_ptr, N, steps, batch):
    """Returns the first row of the samples from ``batch`` on, by bisection."""
    low, high = 0, N
    for _ in range(steps):
        middle = (low + high) // 2
        is_before = (low < high) & (tl.load(coords_ptr + 4 * middle, mask=middle < N) < batch)
        high = tl.where((low < high) & (is_before == 0), middle, high)
        low = tl.where(is_before, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["N", "steps"])
def _pool_samples(
    feats_ptr, coords_ptr, out_ptr, notes_ptr, N, steps,
    C: tl.constexpr, TAKES_LARGEST: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    begin = _first_row(coords_ptr, N, steps, batch)
    end = _first_row(coords_ptr, N, steps, batch + 1)
    best = tl.full([BC], float("-inf"), tl.float32)
    note = tl.full([BC], -1, tl.int32)
    total = tl.zeros([BC], tl.float32)
    first = begin
    while first < end:
        row = first + tl.arange(0, BM)
        is_place = (row < end)[:, None] & (c < C)[None, :]
        place = feats_ptr + row[:, None].to(tl.int64) * C + c[None, :]
        read = tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        if TAKES_LARGEST:
            # NaN is the largest, as in PyTorch.
            is_nan = (is_place & (read != read)).to(tl.int32)
            has_nan = tl.max(is_nan, 0) > 0
            read = tl.where(is_place & (read == read), read, float("-inf"))
            largest = tl.where(has_nan, float("nan"), tl.max(read, 0))
            winner = tl.where(has_nan, tl.argmax(is_nan, 0), tl.argmax(read, 0))
            wins = (largest > best) | (note < 0) | (has_nan & (best == best))
            best = tl.where(wins, largest, best)
            note = tl.where(wins, first + winner, note)
        else:
            total += tl.sum(read, 0)
        first += BM
    if TAKES_LARGEST:
        result = tl.load(
            feats_ptr + note.to(tl.int64) * C + c, mask=(c < C) & (note >= 0), other=0.0
        ).to(tl.float32)
    else:
        note = tl.zeros([BC], tl.int32) + (end - begin)
        result = total * (1.0 / tl.maximum(end - begin, 1).to(tl.float32))
    out = batch.to(tl.int64) * C + c
    tl.store(out_ptr + out, result.to(out_ptr.dtype.element_ty), mask=c < C)
    tl.store(notes_ptr + out, note, mask=c < C)


@triton.jit(do_not_specialize=["N"])
def _pool_samples_backward(
    grad_ptr, coords_ptr, notes_ptr, out_ptr, N,
    C: tl.constexpr, TAKES_LARGEST: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    is_place = (row < N)[:, None] & (c < C)[None, :]
    batch = tl.load(coords_ptr + 4 * row, mask=row < N, other=0)
    place = batch[:, None].to(tl.int64) * C + c[None, :]
    grad = tl.load(grad_ptr + place, mask=is_place, other=0.0).to(tl.float32)
    note = tl.load(notes_ptr + place, mask=is_place, other=1)
    grad = tl.where(note == row[:, None], grad, 0.0) if TAKES_LARGEST else grad / note
    out = out_ptr + row[:, None].to(tl.int64) * C + c[None, :]
    tl.store(out, grad.to(out_ptr.dtype.element_ty), mask=is_place)
