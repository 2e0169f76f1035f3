"""The order in which a sparse convolution gathers, multiplies and sums its pairs.

Pairs (row, source) are grouped by block of rows and, within a block, by kernel offset. A
block's sources are gathered once, one matrix product per offset turns them into parts, and
every row sums its parts as one bag of indices. Each row is written once and its parts are
added in a fixed order, without atomic additions, so that results are repeatable if the matrix
products are. Blocks can be small enough for their buffers to stay in the CPU's cache.

Shape suffixes: K offsets, R rows of the level, B blocks, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowBlock:
    """The pairs of one block of rows; P is their number.

    Attributes:
        first: first row of the block.
        last: one past its last row.
        num_pairs: P.
        counts: number of pairs per offset, K values that sum to P.
        sources_P: int32, each pair's row in the tensor that is read, grouped by offset.
        rows_P: int32, the row (of the whole level) that each pair contributes to.
        bag_P: int32, positions (0 to P - 1) of each row's pairs, one row after another.
        bag_starts: int32 [last - first], start of each row's positions in ``bag_P``.
    """

    first: int
    last: int
    num_pairs: int
    counts: list[int]
    sources_P: Tensor
    rows_P: Tensor
    bag_P: Tensor
    bag_starts: Tensor


GatherPlan = list[RowBlock]
"""All blocks of rows of a level; at least one, which may be empty."""


def build_gather_plan(sources_KR: Tensor, rows_per_block: int) -> GatherPlan:
    """Groups the pairs of a table (int32: a row's source at an offset, or -1) by block of rows.

    Costs one read-back to the host, of the number of pairs per block and offset.
    """
    volume, num_rows = sources_KR.shape
    num_blocks = max(1, -(-num_rows // rows_per_block))
    padded = num_blocks * rows_per_block
    if padded != num_rows:
        sources_KR = torch.nn.functional.pad(sources_KR, (0, padded - num_rows), value=-1)
    grouped = sources_KR.view(volume, num_blocks, rows_per_block).transpose(0, 1).contiguous()
    exists = grouped >= 0
    counts_BK: list[list[int]] = exists.sum(2).tolist()
    flat_P = exists.view(-1).nonzero().view(-1)
    sources_P = grouped.view(-1).index_select(0, flat_P)
    block_P = flat_P // (volume * rows_per_block)
    rows_P = (flat_P % rows_per_block + block_P * rows_per_block).int()

    # The same pairs in row order, each as its position in its block's offset order.
    pairs_B = [sum(counts) for counts in counts_BK]
    place = exists.view(num_blocks, -1).cumsum(1, dtype=torch.int32) - 1
    by_row = exists.transpose(1, 2)
    bag_P = place.view(exists.shape).transpose(1, 2)[by_row]
    per_row = by_row.sum(2, dtype=torch.int32)
    starts = per_row.cumsum(1, dtype=torch.int32) - per_row

    blocks = []
    begin = 0
    for b, pairs in enumerate(pairs_B):
        first = b * rows_per_block
        last = min(num_rows, first + rows_per_block)
        part = slice(begin, begin + pairs)
        blocks.append(
            RowBlock(
                first=first,
                last=last,
                num_pairs=pairs,
                counts=counts_BK[b],
                sources_P=sources_P[part],
                rows_P=rows_P[part],
                bag_P=bag_P[part],
                bag_starts=starts[b, : last - first],
            )
        )
        begin += pairs
    return blocks
