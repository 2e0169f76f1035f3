"""Gradient of a convolution's weights: equal chunks of pairs, whose sums are added in order.

Every chunk has pairs of one offset and the same length, so that the centre, which has many times
the pairs of a corner, does not run on alone. Chunks depend on the number of pairs only, and are
added in their order without atomic additions: equal bits in every run. Shape suffixes: N input
rows, M output rows, K offsets, C input channels, D output channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepipe.sparse.backends.triton.configurations import (
    INTERPRETED,
    configuration,
    is_upcast,
    precision,
)
from sparsepipe.sparse.backends.triton.tiles import pairs
from sparsepipe.sparse.kernel_map import KernelMap

_LEAST_PAIRS = 64 if INTERPRETED else 4096
_MOST_BYTES = 100_000_000
"""Bound of the memory of all chunks' sums."""
_SUM_BLOCK = 1024


def weight_gradient(
    feats_NC: Tensor, grad_MD: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap
) -> Tensor:
    """Returns the gradient [K, C, D] of the kernel, in its dtype."""
    volume, channels, width = kernel_KCD.shape
    found = pairs(kernel_map)
    most = volume * kernel_map.num_outputs
    length = chunk_length(most, channels * width)
    chunks = triton.cdiv(most, length) + volume  # at most: the number of pairs is not read back
    parts = feats_NC.new_empty(chunks, channels, width, dtype=torch.float32)
    chosen = configuration(feats_NC, "weights", channels, width, kernel_map.num_outputs)
    grid = (chunks, triton.cdiv(channels, chosen.rows), triton.cdiv(width, chosen.columns))
    _add_chunk[grid](
        feats_NC, grad_MD, found.inputs_P, found.outputs_P, found.starts, parts,
        C=channels, D=width, K=volume, KP=triton.next_power_of_2(volume), LENGTH=length,
        PRECISION=precision(), IS_UPCAST=is_upcast(feats_NC),
        BP=chosen.reduced, BC=chosen.rows, BD=chosen.columns,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return sum_chunks(parts, found.starts, length, like=kernel_KCD)


def chunk_length(count: int, size: int, *, least: int = _LEAST_PAIRS) -> int:
    """Number of pairs of a chunk, if there are at most ``count`` pairs and sums of ``size``
    numbers; a power of 2, as ``least`` is.
    """
    return int(max(least, triton.next_power_of_2(triton.cdiv(4 * count * size, _MOST_BYTES))))


def sum_chunks(parts: Tensor, starts: Tensor, length: int, *, like: Tensor) -> Tensor:
    """Adds up chunks of ``length`` pairs, those of each offset in their order.

    Args:
        parts: float32, the sums of chunks one after the other.
        starts: int32 [K + 1], the first pair of each offset.
        length: number of pairs of a chunk.
        like: tensor whose shape and dtype the result has.
    """
    total = like.new_empty(like.shape)  # contiguous
    volume = starts.shape[0] - 1
    size = total.numel() // volume
    grid = (volume, triton.cdiv(size, _SUM_BLOCK))
    _add_chunks[grid](
        parts, starts, total, size,
        K=volume, KP=triton.next_power_of_2(volume), LENGTH=length, BLOCK=_SUM_BLOCK,
    )  # fmt: skip
    return total


@triton.jit
def _chunks(starts_ptr, LENGTH: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Returns, for each offset, its first pair and the end of its pairs, and its first chunk and
    the number of its chunks.
    """
    k = tl.arange(0, KP)
    low = tl.load(starts_ptr + k, mask=k < K, other=0)
    high = tl.load(starts_ptr + k + 1, mask=k < K, other=0)
    number = (high - low + LENGTH - 1) // LENGTH
    return low, high, tl.cumsum(number, 0) - number, number


@triton.jit
def _add_chunk(
    feats_ptr, grad_ptr, inputs_ptr, outputs_ptr, starts_ptr, parts_ptr,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LENGTH: tl.constexpr,
    PRECISION: tl.constexpr, IS_UPCAST: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    low, high, first, number = _chunks(starts_ptr, LENGTH, K, KP)
    is_own = (chunk >= first) & (chunk < first + number)
    begin = tl.sum(tl.where(is_own, low + (chunk - first) * LENGTH, 0), 0)
    end = tl.minimum(begin + LENGTH, tl.sum(tl.where(is_own, high, 0), 0))
    if begin < end:
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        d = tl.program_id(2) * BD + tl.arange(0, BD)
        total = tl.zeros((BC, BD), tl.float32)
        for step in range(0, end - begin, BP):
            pair = begin + step + tl.arange(0, BP)
            is_pair = pair < end
            source = tl.load(inputs_ptr + pair, mask=is_pair, other=0).to(tl.int64)
            row = tl.load(outputs_ptr + pair, mask=is_pair, other=0).to(tl.int64)
            read = tl.load(
                feats_ptr + source[None, :] * C + c[:, None],
                mask=is_pair[None, :] & (c < C)[:, None],
                other=0.0,
            )
            grad = tl.load(
                grad_ptr + row[:, None] * D + d[None, :],
                mask=is_pair[:, None] & (d < D)[None, :],
                other=0.0,
            )
            if IS_UPCAST:
                read, grad = read.to(tl.float32), grad.to(tl.float32)
            total = tl.dot(read, grad, total, input_precision=PRECISION)
        part = parts_ptr + (chunk.to(tl.int64) * C + c[:, None]) * D + d[None, :]
        tl.store(part, total, mask=(c < C)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_chunks(
    parts_ptr, starts_ptr, total_ptr, size,
    K: tl.constexpr, KP: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, _, first, number = _chunks(starts_ptr, LENGTH, K, KP)
    is_own = tl.arange(0, KP) == offset
    chunk = tl.sum(tl.where(is_own, first, 0), 0)
    last = chunk + tl.sum(tl.where(is_own, number, 0), 0)
    total = tl.zeros([BLOCK], tl.float32)
    while chunk < last:
        part = parts_ptr + chunk.to(tl.int64) * size + place
        total += tl.load(part, mask=place < size, other=0.0)
        chunk += 1
    out = total_ptr + offset.to(tl.int64) * size + place
    tl.store(out, total.to(total_ptr.dtype.element_ty), mask=place < size)
