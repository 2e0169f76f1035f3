"""Cuts minibatches into microbatches along their samples.

A batch is a pytree of tensors, cut along their first dimension, or by batch index if sparse. Parts
have the sizes of :func:`torch.tensor_split`: as even as possible, the larger ones first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.sparse import SparseTensor

_SHARED = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype)
"""Types of values that belong to no single sample: every part gets the whole value."""
_REMEDY = (
    "let the loader's collate function make a batch in which every tensor has a row for each "
    "sample (what belongs to single voxels, such as their labels, as the feats of a SparseTensor), "
    "or set microbatches to the number of devices of the first stage, so that nothing is cut"
)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A microbatch: the number of its samples, and its part of the batch; None without samples."""

    samples: int
    batch: Any


def split(batch: Any, parts: int) -> list[BatchPart]:
    """Cuts a batch into parts; with fewer samples than parts, the last parts are empty.

    Tensors and numpy arrays are cut along their first dimension, without a copy; sparse tensors by
    batch index, which counts from 0 in each part; lists and tuples without tensors, such as names,
    if they have an entry for each sample. Numbers, text, None and tensors without dimensions go
    into every part. A single part is the batch itself, counted as one sample if that is unknown.
    """
    assert parts > 0
    if parts == 1:
        try:
            return [BatchPart(num_samples(batch), batch)]
        except ConfigError:
            return [BatchPart(1, batch)]
    samples = num_samples(batch)
    sizes = (samples // parts + (part < samples % parts) for part in range(parts))
    found = []
    for first, last in pairwise(accumulate(sizes, initial=0)):
        cut = partial(_cut, first=first, last=last, samples=samples, sites={})
        part = pytree.tree_map(cut, batch, is_leaf=_is_leaf) if last > first else None
        found.append(BatchPart(last - first, part))
    return found


def num_samples(batch: Any) -> int:
    """Number of samples of a batch; a ConfigError if its tensors disagree or none has samples."""
    found: list[tuple[int, str]] = []
    for path, leaf in pytree.tree_flatten_with_path(batch, is_leaf=_is_leaf)[0]:
        count = leaf.batch_size if isinstance(leaf, SparseTensor) else None
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim:
            count = leaf.shape[0]
        if count is not None:
            kind = "tensor" if type(leaf) is Tensor else type(leaf).__name__
            found.append((count, f"{kind} {pytree.keystr(path)}".strip()))
    if not found or not found[0][0]:
        raise ConfigError(
            f"cannot cut a minibatch into microbatches: no tensor of this {type(batch).__name__} "
            "has samples",
            remedy=_REMEDY,
        )
    (first, name), *others = found
    for count, other in others:
        if count != first:
            raise ConfigError(
                f"cannot cut a minibatch into microbatches: its {name} has {first} samples, but "
                f"its {other} has {count}",
                remedy=_REMEDY,
            )
    return first


def _cut(
    leaf: Any, *, first: int, last: int, samples: int, sites: dict[int, tuple[Tensor, Tensor]]
) -> Any:
    """Samples ``first`` to ``last`` - 1; ``sites``: rows and coordinates that sparse ones share."""
    if isinstance(leaf, SparseTensor):
        if id(leaf.coords) not in sites:
            batch_N = leaf.coords[:, 0]
            rows = ((batch_N >= first) & (batch_N < last)).nonzero().squeeze(1)
            coords_N4 = leaf.coords[rows]
            coords_N4[:, 0] -= first
            sites[id(leaf.coords)] = rows, coords_N4
        rows, coords_N4 = sites[id(leaf.coords)]
        return SparseTensor(
            leaf.feats[rows],
            coords_N4,
            stride=leaf.stride,
            spatial_shape=leaf.spatial_shape,
            batch_size=last - first,
        )
    if isinstance(leaf, Tensor) and leaf.dim():
        # Views with version counters of their own: a step may write to one part of its batch.
        return (leaf if leaf.requires_grad else leaf.data)[first:last]
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        return leaf[first:last]
    if isinstance(leaf, list | tuple):
        return leaf[first:last] if len(leaf) == samples else leaf
    if isinstance(leaf, (*_SHARED, Tensor, np.ndarray)):
        return leaf
    raise ConfigError(
        f"cannot cut a minibatch into microbatches: it holds a {type(leaf).__name__}, "
        "whose samples are unknown",
        remedy=f"{_REMEDY}; register a class of your own with "
        "torch.utils._pytree.register_pytree_node",
    )


def _is_leaf(node: Any) -> bool:
    if isinstance(node, SparseTensor):
        return True
    if not isinstance(node, list | tuple) or not node:
        return False
    inside = pytree.tree_leaves(node, is_leaf=lambda x: isinstance(x, SparseTensor))
    return all(isinstance(leaf, _SHARED) for leaf in inside)
