"""Sparse convolution by gathered rows and matrix products, with its gradients.

Shape suffixes: N input sites, M output sites, K offsets, C input channels, D output
channels, P pairs of a block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsepipe.sparse.gather_plan import RowBlock
from sparsepipe.sparse.kernel_map import KernelMap
from sparsepipe.sparse.saved_tensors import save, saved


class _Workspace(threading.local):
    """Keeps a byte buffer per thread and name, which grows when a larger tensor is taken.

    Fresh memory costs a page fault for every 4 KiB touched, which for buffers of some
    megabytes takes longer than the copy into them. CUDA tensors are not kept here: CUDA's
    caching allocator does that, and respects streams.
    """

    def take(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Returns an uninitialised tensor of this shape, with the dtype and device of ``like``,
        valid until this thread's next call with ``name``.
        """
        if like.device.type != "cpu":
            return like.new_empty(shape)
        size = shape[0] * shape[1] * like.element_size()
        buffers: dict[str, Tensor] = vars(self)  # this thread's own
        buffer = buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=like.device)
            buffers[name] = buffer
        return buffer[:size].view(like.dtype).view(shape)


workspace = _Workspace()

# Up to this many input channels all offsets go into one product over [M, K * C]: it
# multiplies zeros, but products this thin are bound by memory, not by arithmetic.
_NARROW_CHANNELS = 4
# So few channels and so many offsets that products of one offset take longer than those with zeros:
# a window of 5^3 at the first layer of a network of scenes. Its columns are too large to be kept.
_COLUMN_CHANNELS = 16
_COLUMN_VOLUME = 64
_COLUMN_BYTES = 4_000_000
# The products write a block's parts, and the sums read them once. On a CPU they should still
# be in its last-level cache by then; on other devices the limit only bounds memory.
_BLOCK_BYTES = 16_000_000
_DEVICE_BLOCK_BYTES = 2_000_000_000
_MIN_BLOCK_ROWS = 256


def convolve(feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
    """Convolves features with a kernel; returns the features [M, D] of the output sites."""
    if kernel_map.num_outputs == 0 or kernel_map.num_inputs == 0:
        # Without rows there are no products, but both operands must stay in the graph.
        out = feats_NC.sum(0) @ kernel_KCD.sum(0)
        return out.expand(kernel_map.num_outputs, -1)
    volume, channels, _ = kernel_KCD.shape
    function: type[torch.autograd.Function] = _Convolution
    if channels <= _NARROW_CHANNELS:
        function = _NarrowConvolution
    elif channels <= _COLUMN_CHANNELS and volume >= _COLUMN_VOLUME:
        function = _ColumnConvolution
    result: Tensor = function.apply(feats_NC, kernel_KCD, kernel_map)  # type: ignore[no-untyped-call]
    return result


def _block_rows(kernel_map: KernelMap, kernel_KCD: Tensor) -> int:
    """Returns the number of rows per block: as many as fit the memory budget, but not too few.

    Every block reads the whole kernel, so a block with fewer pairs per offset than channels
    moves more weights than features.
    """
    volume, *channels = kernel_KCD.shape
    rows = max(1, kernel_map.num_outputs, kernel_map.num_inputs)
    on_cpu = kernel_KCD.device.type == "cpu"
    budget = _BLOCK_BYTES if on_cpu else _DEVICE_BLOCK_BYTES
    pairs = max(budget / (max(channels) * kernel_KCD.element_size()), max(channels) * volume)
    blocks = max(1, round(kernel_map.num_pairs / pairs))
    return min(rows, max(_MIN_BLOCK_ROWS, -(-rows // blocks)))


class _Convolution(torch.autograd.Function):
    """One matrix product per offset on gathered rows, summed per output row.

    ``out[r] = sum over pairs (r, s) at offset k of feats[s] @ kernel[k]``
    """

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
        save(ctx, feats_NC, kernel_KCD, derived=kernel_map)
        plan = kernel_map.gather_plan(_block_rows(kernel_map, kernel_KCD))
        feats_NC = feats_NC.contiguous()
        kernels, centre = kernel_KCD.unbind(0), kernel_map.spec.centre
        out_MD = feats_NC.new_empty(kernel_map.num_outputs, kernel_KCD.shape[2])
        for block in plan:
            parts = _allocate_parts(block, kernel_KCD.shape[2], feats_NC)
            for k, (rows_P, part) in enumerate(_by_offset(block, block.sources_P, parts)):
                if k == centre or part.shape[0]:  # at the centre every row is its own source
                    read = _rows("gathered", feats_NC, block, None if k == centre else rows_P)
                    torch.mm(read, kernels[k], out=part)
            summed = _bag_sum(parts, block)
            if len(plan) == 1:
                return summed
            # Copied at once: the sum of one block is still in the cache, those of all are not.
            out_MD[block.first : block.last] = summed
        return out_MD

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (feats_NC, kernel_KCD), kernel_map = saved(ctx)
        gradients = differentiable_gradients if torch.is_grad_enabled() else _gradients
        needs = ctx.needs_input_grad
        grads = gradients(feats_NC, kernel_KCD, grad_MD.contiguous(), kernel_map, needs)
        return (*grads, None)


class _NarrowConvolution(torch.autograd.Function):
    """A single matrix product over all offsets together, for inputs with few channels."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
        volume, channels, width = kernel_KCD.shape
        padded = torch.cat([feats_NC, feats_NC.new_zeros(1, channels)])
        rows_MK = kernel_map.neighbours_MK
        columns = padded.index_select(0, rows_MK.view(-1)).view(-1, volume * channels)
        save(ctx, feats_NC, kernel_KCD, columns, derived=kernel_map)
        return columns @ kernel_KCD.reshape(volume * channels, width)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (feats_NC, kernel_KCD, *columns), kernel_map = saved(ctx)
        needs, operands = ctx.needs_input_grad, (feats_NC, kernel_KCD, grad_MD.contiguous())
        if torch.is_grad_enabled():
            return (*differentiable_gradients(*operands, kernel_map, needs), None)
        grad_feats = grad_kernel = None
        if needs[0]:
            grad_feats, _ = _gradients(*operands, kernel_map, (True, False))
        if needs[1] and columns:
            grad_kernel = (columns[0].t() @ grad_MD).view(kernel_KCD.shape)
        elif needs[1]:
            wide = torch.promote_types(kernel_KCD.dtype, torch.float32)
            total = torch.zeros_like(kernel_KCD, dtype=wide).flatten(0, 1)
            for rows, remade in _columns(feats_NC, kernel_map):
                _accumulate(total, remade.t(), grad_MD[rows], first=False)
            grad_kernel = total.view(kernel_KCD.shape).to(kernel_KCD.dtype)
        return grad_feats, grad_kernel, None


class _ColumnConvolution(_NarrowConvolution):
    """The product of :class:`_NarrowConvolution` by blocks, whose columns the backward remakes."""

    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, kernel_KCD: Tensor, kernel_map: KernelMap) -> Tensor:
        save(ctx, feats_NC, kernel_KCD, derived=kernel_map)
        flat = kernel_KCD.flatten(0, 1)
        out_MD = feats_NC.new_empty(kernel_map.num_outputs, kernel_KCD.shape[2])
        for rows, columns in _columns(feats_NC, kernel_map):
            torch.mm(columns, flat, out=out_MD[rows])
        return out_MD


def _columns(feats_NC: Tensor, kernel_map: KernelMap) -> Iterator[tuple[slice, Tensor]]:
    """Yields blocks of output rows, and what they read at all offsets, [rows, K * C], with zeros
    where there is nothing; valid until the next block.
    """
    padded, rows_MK = F.pad(feats_NC, (0, 0, 0, 1)), kernel_map.neighbours_MK
    count, (volume, channels) = len(rows_MK), (rows_MK.shape[1], feats_NC.shape[1])
    budget = _COLUMN_BYTES if feats_NC.device.type == "cpu" else _DEVICE_BLOCK_BYTES
    step = max(1, budget // (volume * channels * feats_NC.element_size()))
    for first in range(0, count, step):
        rows_P = rows_MK[first : first + step].reshape(-1)
        columns = workspace.take("columns", (len(rows_P), channels), feats_NC)
        torch.index_select(padded, 0, rows_P, out=columns)
        yield slice(first, min(count, first + step)), columns.view(-1, volume * channels)


def _gradients(
    feats_NC: Tensor,
    kernel_KCD: Tensor,
    grad_MD: Tensor,
    kernel_map: KernelMap,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients of features and kernel; None for one that is not needed.

    ``needs``: whether features and kernel need one; what follows these two is ignored.
    """
    need_feats, need_kernel = needs[:2]
    plan = kernel_map.scatter_plan(_block_rows(kernel_map, kernel_KCD))
    centre = kernel_map.spec.centre
    kernels = kernel_KCD.transpose(1, 2).unbind(0)
    grad_kernel = None
    if need_kernel:
        # A running sum over blocks in 16 bits would lose precision with every block.
        wide = torch.promote_types(kernel_KCD.dtype, torch.float32)
        dtype = kernel_KCD.dtype if len(plan) == 1 else wide
        grad_kernel = torch.empty_like(kernel_KCD, dtype=dtype)
    slots = None if grad_kernel is None else grad_kernel.unbind(0)
    if kernel_map.spec.is_symmetric:
        # A symmetric window's forward plan lists the readers of offset k under K - 1 - k.
        kernels, slots = kernels[::-1], None if slots is None else slots[::-1]
    grad_feats = feats_NC.new_empty(feats_NC.shape) if need_feats else None
    for b, block in enumerate(plan):
        parts = _allocate_parts(block, feats_NC.shape[1], feats_NC)
        own_rows = block.rows_P.split_with_sizes(block.counts)
        for k, (rows_P, part) in enumerate(_by_offset(block, block.sources_P, parts)):
            read = _rows("gathered", grad_MD, block, None if k == centre else rows_P)
            if slots is not None:
                own = _rows("own", feats_NC, block, None if k == centre else own_rows[k])
                _accumulate(slots[k], own.t(), read, first=b == 0)
            if need_feats and part.shape[0]:
                torch.mm(read, kernels[k], out=part)
        if grad_feats is not None and len(plan) > 1:
            grad_feats[block.first : block.last] = _bag_sum(parts, block)
        elif need_feats:
            grad_feats = _bag_sum(parts, block)
    if grad_kernel is not None:
        grad_kernel = grad_kernel.to(kernel_KCD.dtype)
    return grad_feats, grad_kernel


def differentiable_gradients(
    feats_NC: Tensor,
    kernel_KCD: Tensor,
    grad_MD: Tensor,
    kernel_map: KernelMap,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Computes what :func:`_gradients` does, with operations that autograd can differentiate.

    At each offset, a row is in at most one pair, so no sum depends on the order of threads.
    """
    need_feats, need_kernel = needs[:2]
    pairs = kernel_map.derived("pairs", pairs_by_offset)
    grad_feats = feats_NC.new_zeros(feats_NC.shape)
    grads_CD = []
    for kernel_CD, (outputs_P, inputs_P) in zip(kernel_KCD, pairs, strict=True):
        read_PD = grad_MD.index_select(0, outputs_P)
        if need_feats:
            grad_feats = grad_feats.index_add(0, inputs_P, read_PD @ kernel_CD.t())
        if need_kernel:
            grads_CD.append(feats_NC.index_select(0, inputs_P).t() @ read_PD)
    return (
        grad_feats if need_feats else None,
        torch.stack(grads_CD) if need_kernel else None,
    )


def pairs_by_offset(kernel_map: KernelMap) -> list[tuple[Tensor, Tensor]]:
    """Returns, for each offset, the output rows and the input rows (int64) of its pairs."""
    rows_KM = kernel_map.neighbours_KM
    exists_KM = rows_KM >= 0
    sizes: list[int] = exists_KM.sum(1).tolist()
    outputs = exists_KM.nonzero()[:, 1].split_with_sizes(sizes)
    inputs = rows_KM[exists_KM].long().split_with_sizes(sizes)
    return list(zip(outputs, inputs, strict=True))


def _accumulate(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    if right.shape[0] == 0:
        if first:
            total.zero_()
    elif total.dtype != right.dtype:
        product = left @ right
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def _product_rows(count: int, like: Tensor) -> int:
    """Returns how many rows to allocate for a product of ``count`` rows; the others are ignored.

    In 16 bits on a CPU each new shape of a product is compiled first, which takes longer than most
    products, and pair counts differ from batch to batch. Rounding them up makes shapes repeat:
    small counts to a multiple of 16, larger ones to a coarser step that adds at most an eighth.
    """
    if like.device.type != "cpu" or like.element_size() != 2:
        return count
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def _allocate_parts(block: RowBlock, width: int, like: Tensor) -> Tensor:
    """Returns a buffer for all products of a block, with spare rows to round up the last one."""
    spare = max(_product_rows(count, like) - count for count in block.counts)
    return workspace.take("parts", (block.num_pairs + spare, width), like)


def _by_offset(block: RowBlock, rows_P: Tensor, parts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, for each offset, its rows of ``rows_P`` and the part of ``parts`` for its product.

    The surplus rows of a rounded product overlap the next product, which is written later.
    """
    first = 0
    for rows in rows_P.split_with_sizes(block.counts):
        yield rows, parts[first : first + _product_rows(len(rows), parts)]
        first += len(rows)


def _rows(name: str, source: Tensor, block: RowBlock, rows_P: Tensor | None) -> Tensor:
    """Returns the rows ``rows_P`` (None: those of the block) of ``source``, padded with zeros."""
    if rows_P is None:
        rows = source[block.first : block.last]
        if _product_rows(len(rows), source) == len(rows):
            return rows
    count = block.last - block.first if rows_P is None else len(rows_P)
    out = workspace.take(name, (_product_rows(count, source), source.shape[1]), source)
    if rows_P is None:
        out[:count] = rows
    else:
        torch.index_select(source, 0, rows_P, out=out[:count])
    out[count:].zero_()
    return out


def _bag_sum(parts_PD: Tensor, block: RowBlock) -> Tensor:
    """Sums the parts of each row of the block in a fixed order; 0 for rows without parts."""
    if block.num_pairs == 0:
        return parts_PD.new_zeros(block.last - block.first, parts_PD.shape[1])
    out: Tensor = torch.embedding_bag(parts_PD, block.bag_P, block.bag_starts)[0]
    return out
