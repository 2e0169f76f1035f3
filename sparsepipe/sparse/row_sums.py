"""Weighted sums of rows whose terms are added in a fixed order, and their adjoints.

Shape suffixes: P terms, N rows that are read, M rows of the result, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsepipe.sparse.saved_tensors import save, saved


@dataclass(frozen=True, slots=True, eq=False)
class _Bags:
    """The terms of each row of the result, one row after another."""

    sources_P: Tensor
    starts_M: Tensor
    weights_P: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class RowSums:
    """A linear map of rows: each row of the result is a weighted sum of rows that it reads.

    It is differentiable any number of times, and repeats its bits: no atomic additions.
    """

    _own: _Bags
    _adjoint: _Bags

    @classmethod
    def of(
        cls,
        sources_P: Tensor,
        targets_P: Tensor,
        *,
        num_sources: int,
        num_targets: int,
        weights_P: Tensor | None = None,
        is_mean: bool = False,
    ) -> RowSums:
        """Builds the map that adds ``weights_P * row sources_P`` to row ``targets_P``; rows are
        int64. ``weights_P``: None for 1, or, with ``is_mean``, for 1 / number of the row's terms.
        """
        if is_mean:
            weights_P = torch.bincount(targets_P).double().reciprocal().index_select(0, targets_P)
        bags = []
        sides = ((sources_P, targets_P, num_targets), (targets_P, sources_P, num_sources))
        for read_P, added_P, rows in sides:
            order_P = torch.argsort(added_P, stable=True)
            counts = torch.bincount(added_P, minlength=rows)
            weights = None if weights_P is None else weights_P.index_select(0, order_P)
            bags.append(_Bags(read_P.index_select(0, order_P), counts.cumsum(0) - counts, weights))
        return cls(*bags)

    def __call__(self, feats_NC: Tensor) -> Tensor:
        """Returns the result [M, C] in the dtype of ``feats_NC``, added up in at least float32."""
        wide = torch.promote_types(feats_NC.dtype, torch.float32)
        out: Tensor = _Sum.apply(feats_NC.to(wide), self)  # type: ignore[no-untyped-call]
        return out.to(feats_NC.dtype)

    @property
    def first_terms_M(self) -> Tensor:
        """The row that is read first by each row of the result, int64; each must read one."""
        return self._own.sources_P.index_select(0, self._own.starts_M)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats_NC: Tensor, sums: RowSums) -> Tensor:
        save(ctx, derived=sums)
        own = sums._own
        if not len(own.sources_P):
            return feats_NC.new_zeros(len(own.starts_M), feats_NC.shape[1])
        weights = None if own.weights_P is None else own.weights_P.to(feats_NC.dtype)
        out: Tensor = torch.embedding_bag(
            feats_NC.contiguous(), own.sources_P, own.starts_M, per_sample_weights=weights
        )[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None]:
        _, sums = saved(ctx)
        turned = RowSums(sums._adjoint, sums._own)
        return _Sum.apply(grad_MC, turned), None  # type: ignore[no-untyped-call]
