"""Convolution of few channels, as of a network's first layer: one product over all offsets.

The sources of a row at all offsets, side by side, have at most 128 numbers: they are one operand of
a single matrix product, which gathers every number once. Shape suffixes: N input rows, M output
rows, K offsets, C input channels, D output channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepipe.sparse.backends.triton.configurations import is_upcast, precision
from sparsepipe.sparse.backends.triton.weights import chunk_length, sum_chunks
from sparsepipe.sparse.kernel_map import KernelMap

MOST_CHANNELS = 4
_ROWS, _COLUMNS = 64, 64
_LEAST_ROWS = 1024
"""Number of rows of a chunk, with which a large level still has programs for all of a card."""


def narrow(
    feats_NC: Tensor, kernel_KCD: Tensor, bias_D: Tensor | None, kernel_map: KernelMap
) -> Tensor:
    """Returns features [M, D] of the output rows."""
    volume, channels, width = kernel_KCD.shape
    rows_KM = kernel_map.neighbours_KM
    out_MD = feats_NC.new_empty(kernel_map.num_outputs, width)
    grid = (triton.cdiv(kernel_map.num_outputs, _ROWS), triton.cdiv(width, _COLUMNS))
    _multiply[grid](
        feats_NC, kernel_KCD, bias_D, rows_KM, out_MD, kernel_map.num_outputs, rows_KM.stride(0),
        C=channels, D=width, K=volume, HAS_BIAS=bias_D is not None,
        PRECISION=precision(), IS_UPCAST=is_upcast(feats_NC),
        BM=_ROWS, BR=_operand(volume * channels), BD=_COLUMNS,
    )  # fmt: skip
    return out_MD


def narrow_weights(
    feats_NC: Tensor, grad_MD: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap
) -> Tensor:
    """Returns the gradient [K, C, D] of the kernel, in its dtype."""
    volume, channels, width = kernel_KCD.shape
    rows_KM, count = kernel_map.neighbours_KM, kernel_map.num_outputs
    length = chunk_length(count, volume * channels * width, least=_LEAST_ROWS)
    chunks = triton.cdiv(count, length)
    parts = feats_NC.new_empty(chunks, volume * channels, width, dtype=torch.float32)
    _add_rows[(chunks, triton.cdiv(width, _COLUMNS))](
        feats_NC, grad_MD, rows_KM, parts, count, rows_KM.stride(0),
        C=channels, D=width, K=volume, LENGTH=length,
        PRECISION=precision(), IS_UPCAST=is_upcast(feats_NC),
        BM=_ROWS, BR=_operand(volume * channels), BD=_COLUMNS,
    )  # fmt: skip
    starts = kernel_map.derived(
        "all rows",
        lambda _: torch.arange(0, count + 1, count, dtype=torch.int32, device=rows_KM.device),
    )
    return sum_chunks(parts, starts, length, like=kernel_KCD)


def _operand(size: int) -> int:
    return int(max(16, triton.next_power_of_2(size)))


@triton.jit
def _sources(feats_ptr, rows_ptr, row, is_row, stride, C: tl.constexpr, K: tl.constexpr, r):
    """Loads what each of some rows reads at all offsets, [rows, offset and channel]."""
    k, c = r // C, r % C
    source = tl.load(
        rows_ptr + tl.cast(stride, tl.int64) * k[None, :] + row[:, None],
        mask=is_row[:, None] & (k < K)[None, :],
        other=-1,
    )
    return tl.load(feats_ptr + source.to(tl.int64) * C + c[None, :], mask=source >= 0, other=0.0)


@triton.jit(do_not_specialize=["M", "stride"])
def _multiply(
    feats_ptr, kernel_ptr, bias_ptr, rows_ptr, out_ptr, M, stride,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, IS_UPCAST: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    r = tl.arange(0, BR)
    read = _sources(feats_ptr, rows_ptr, row, row < M, stride, C, K, r)
    weights = tl.load(
        kernel_ptr + r[:, None] * D + d[None, :],
        mask=(r < K * C)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if IS_UPCAST:
        read, weights = read.to(tl.float32), weights.to(tl.float32)
    total = tl.dot(read, weights, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + row[:, None].to(tl.int64) * D + d[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["M", "stride"])
def _add_rows(
    feats_ptr, grad_ptr, rows_ptr, parts_ptr, M, stride,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, LENGTH: tl.constexpr,
    PRECISION: tl.constexpr, IS_UPCAST: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    r = tl.arange(0, BR)
    total = tl.zeros((BR, BD), tl.float32)
    for step in range(0, LENGTH, BM):
        row = chunk * LENGTH + step + tl.arange(0, BM)
        read = _sources(feats_ptr, rows_ptr, row, row < M, stride, C, K, r)
        grad = tl.load(
            grad_ptr + row[:, None].to(tl.int64) * D + d[None, :],
            mask=(row < M)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if IS_UPCAST:
            read, grad = read.to(tl.float32), grad.to(tl.float32)
        total = tl.dot(tl.trans(read), grad, total, input_precision=PRECISION)
    part = parts_ptr + (chunk.to(tl.int64) * K * C + r[:, None]) * D + d[None, :]
    tl.store(part, total, mask=(r < K * C)[:, None] & (d < D)[None, :])
