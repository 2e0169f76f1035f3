"""Networks on dense samples of any size, by overlapping windows of one size.

Source: Isensee et al., "nnU-Net: a self-configuring method for deep learning-based biomedical image
segmentation" (2021), methods, "Inference". Places, weights and padding are exactly those of
MONAI's ``sliding_window_inference`` with ``mode="gaussian"``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from sparsepipe.utils.arguments import Count, checked

_SIGMA = 0.125
"""Standard deviation of a window's weights, in sizes of the window."""
_LEAST = 1e-3
"""Smallest weight of a voxel in a window, whose centre has a weight of about 1."""


@checked
@dataclass(frozen=True, slots=True)
class Windows:
    """Means of a network's logits over overlapping windows, weighted by a Gaussian.

    Args:
        size: size of a window along each of the D spatial axes.
        overlap: share of a window's size by which it overlaps the next one along an axis.
        flips: whether a window's logits are the mean over its 2^D mirror images.
    """

    size: Sequence[Count]
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    flips: bool = False

    def places(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the first voxel of each window, in the order of the axes, of a sample with D
        ``sizes``. An axis that is shorter than the window has it in the middle, from a negative
        voxel on.
        """
        starts = []
        for length, size in zip(sizes, self.size, strict=True):
            step = max(int(size * (1 - self.overlap)), 1)
            count = -(-max(length - size, 0) // step) + 1
            starts.append([min(i * step, length - size) for i in range(count)])
            if length < size:
                starts[-1] = [-((size - length) // 2)]
        return list(itertools.product(*starts))

    def mean_logits(
        self,
        network: Callable[[Tensor], Tensor],
        read: Callable[[tuple[slice, ...]], Tensor],
        sizes: Sequence[int],
        *,
        zeros: Callable[[Tensor, tuple[int, ...]], Tensor] = Tensor.new_zeros,
    ) -> Tensor:
        """Returns the logits [K, *sizes] of one sample, of which it holds one window at a time.

        Args:
            network: returns logits [1, K, *size] of an input [1, C, *size].
            read: returns the input [1, C, *slices] in D slices of the sample.
            sizes: the sample's D sizes.
            zeros: makes the tensors in which the windows are summed, given one window's logits,
                whose dtype they have, and a shape: [K, *sizes] and, for weights, [*sizes].
        """
        weights, total, weight = torch.ones(()), torch.empty(0), torch.empty(0)
        for size in self.size:
            x = torch.arange(size, dtype=torch.float32) - (size - 1) / 2
            weights = weights.unsqueeze(-1) * torch.exp(-(x**2) / (2 * (_SIGMA * size) ** 2))
        weights = weights.clamp(min=max(float(weights.min()), _LEAST))
        for place in self.places(sizes):
            inside: list[slice] = []
            own: list[slice] = []
            pads: list[int] = []
            for start, size, length in zip(place, self.size, sizes, strict=True):
                inside.append(slice(max(start, 0), min(start + size, length)))
                own.append(slice(inside[-1].start - start, inside[-1].stop - start))
                pads = [own[-1].start, size - own[-1].stop, *pads]  # the last axis first
            part = read(tuple(inside))
            part = F.pad(part, pads) if any(pads) else part
            logits_K = logits_of(network, part, flips=self.flips)[0]
            if not len(total):
                total = zeros(logits_K, (len(logits_K), *sizes))
                weight, weights = zeros(logits_K, tuple(sizes)), weights.to(total)
            own_K = logits_K[(slice(None), *own)].to(total)
            total[(slice(None), *inside)].addcmul_(own_K, weights[tuple(own)])
            weight[tuple(inside)] += weights[tuple(own)]
        return total.div_(weight)

    def __call__(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns logits [B, K, *sizes] of samples [B, C, *sizes]; see :meth:`mean_logits`."""
        reads = [(lambda part, sample=sample: sample[:, :, *part]) for sample in x.unsqueeze(1)]
        return torch.stack([self.mean_logits(network, read, x.shape[2:]) for read in reads])


def logits_of(network: Callable[[Tensor], Tensor], x: Tensor, *, flips: bool) -> Tensor:
    """Returns logits [B, K, *sizes], in single precision or better, of an input [B, C, *sizes]:
    with ``flips``, the mean over its 2^D mirror images.
    """
    logits = network(x)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not flips:
        return logits
    spatial = range(2, x.dim())
    mirrored = [axes for n in spatial for axes in itertools.combinations(spatial, n - 1)]
    return sum((network(x.flip(a)).flip(a) for a in mirrored), logits) / (len(mirrored) + 1)
