"""Counts, means and squared deviations of channels, taken in parts and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of the values that a batch norm saw of each channel, in double precision.

    Shapes: C channels, P parts.

    Args:
        count: values of each channel: samples, times their pixels or voxels; rows of a sparse
            tensor.
        mean_C: their mean; zero of no values.
        squares_C: the sum of their squared deviations from the mean.
    """

    count: int
    mean_C: Tensor
    squares_C: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Of a batch [N, C, ...] with one value of a channel at least.

        In two passes, the second of which corrects what rounding the mean has left, so that
        channels far from zero keep their digits. On a CPU that costs less than
        ``torch.var_mean``, which does not vectorise over the first dimension.
        """
        exact = values if values.dtype == torch.float64 else values.float()
        others = [dim for dim in range(exact.dim()) if dim != 1]
        count = values.numel() // values.shape[1]
        rounded = exact.mean(others, keepdim=True)
        deviations = exact - rounded
        off_C = deviations.sum(others).double() / count
        squares_C = deviations.square_().sum(others).double() - count * off_C.square()
        mean_C = rounded.flatten().double() + off_C
        return cls(count=count, mean_C=mean_C, squares_C=squares_C.clamp_(min=0))

    @classmethod
    def together(cls, parts: Sequence[Moments]) -> Moments:
        """Of all values of some parts (one at least), of which some may be of none.

        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances", for any number of parts: deviations from the common mean are those within the
        parts and those of the parts' means.
        """
        if len(parts) == 1:
            return parts[0]
        count = sum(part.count for part in parts)
        means_PC = torch.stack([part.mean_C for part in parts])
        shares_P1 = means_PC.new_tensor([[part.count / max(count, 1)] for part in parts])
        mean_C = (shares_P1 * means_PC).sum(0)
        between_C = (shares_P1 * (means_PC - mean_C).square()).sum(0) * count
        within_C = torch.stack([part.squares_C for part in parts]).sum(0)
        return cls(count=count, mean_C=mean_C, squares_C=within_C + between_C)

    def packed(self) -> Tensor:
        """As one vector [1 + 2 C]."""
        return torch.cat([self.mean_C.new_tensor([self.count]), self.mean_C, self.squares_C])

    @classmethod
    def unpacked(cls, vector: Tensor) -> Moments:
        """What :meth:`packed` made."""
        channels = len(vector) // 2
        count, mean_C, squares_C = vector.split_with_sizes([1, channels, channels])
        return cls(count=int(count), mean_C=mean_C, squares_C=squares_C)
