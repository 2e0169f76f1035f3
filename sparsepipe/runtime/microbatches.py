"""A minibatch cut into microbatches along its samples.

Any tree of tensors: a tensor has its samples in its rows, a sparse tensor in its batch index. The
sizes of parts are those of :func:`torch.tensor_split`: as even as can be, the larger ones first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.sparse import SparseTensor

_SHARED = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype)
"""Types that do not belong to single samples: every part has the whole value."""
_REMEDY = (
    "let the loader's collate function make a batch in which every tensor has a row for each "
    "sample, or set microbatches to the number of devices of the first stage (1 of a single one), "
    "which cuts nothing"
)
_OF_SITES = (
    "; what belongs to single voxels, such as their labels, can travel as the feats of a "
    "SparseTensor with coords of its own, which is cut by samples as the input is: as floating "
    "point, of which .long() in the step makes labels again"
)


@dataclass(frozen=True, slots=True)
class Part:
    """A microbatch.

    Args:
        batch: the tree; None where there are no samples.
    """

    samples: int
    batch: Any


def split(batch: Any, parts: int) -> list[Part]:
    """Cuts a batch into parts; of fewer samples than parts, the last ones are empty.

    Tensors and numpy arrays are cut along their first dimension, without a copy. Sparse tensors are
    cut by batch index, which counts from 0 in each part; the order of sites stays. Lists and tuples
    without tensors that are as long as there are samples, such as names, are cut too. Numbers,
    text, None and tensors without dimensions are in every part. A single part is the batch as it
    is, whatever that is.

    Raises:
        ConfigError: the tensors are of unlike numbers of samples, there are none, or the tree
            holds a value that cannot be cut.
    """
    assert parts > 0
    if parts == 1:
        return [Part(_samples_if_known(batch), batch)]
    samples = num_samples(batch)
    ends = accumulate((_size(samples, parts, part) for part in range(parts)), initial=0)
    cut = _Cut(samples)
    return [
        Part(last - first, cut(batch, first, last) if last > first else None)
        for first, last in pairwise(ends)
    ]


def num_samples(batch: Any) -> int:
    """Samples of a batch, on which its tensors agree."""
    first: tuple[int, str] | None = None
    for path, leaf in _leaves(batch):
        count = _samples_of(leaf)
        if count is None:
            continue
        name = f"{_kind(leaf)} {path}" if path else _kind(leaf)
        if first is None:
            first = count, name
        elif count != first[0]:
            raise ConfigError(
                f"a minibatch is to be cut into microbatches, and it holds the {first[1]} of "
                f"{first[0]} samples and the {name} of {count}",
                remedy=_REMEDY + (_OF_SITES if {count, first[0]} & _sites_of(batch) else ""),
            )
    if first is None or not first[0]:
        raise ConfigError(
            f"a minibatch is to be cut into microbatches, and no tensor of it ({_kind(batch)}) has "
            "samples",
            remedy=_REMEDY,
        )
    return first[0]


def _samples_if_known(batch: Any) -> int:
    """The number of samples of a batch that is not cut; 1 where its tensors disagree."""
    try:
        return num_samples(batch)
    except ConfigError:
        return 1


def _size(samples: int, parts: int, part: int) -> int:
    return samples // parts + (part < samples % parts)


class _Cut:
    """Cuts trees of one number of samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __call__(self, batch: Any, first: int, last: int) -> Any:
        """The samples from ``first`` up to ``last``, without that one."""
        sites: dict[int, tuple[Tensor, Tensor]] = {}  # tensors on the same sites go on sharing them

        def cut(leaf: Any) -> Any:
            if isinstance(leaf, SparseTensor):
                return _sparse(leaf, first, last, sites)
            if isinstance(leaf, Tensor):
                return _rows(leaf, first, last) if leaf.dim() else leaf
            if isinstance(leaf, np.ndarray):
                return leaf[first:last] if leaf.ndim else leaf
            if isinstance(leaf, list | tuple):
                return leaf[first:last] if len(leaf) == self._samples else leaf
            if isinstance(leaf, _SHARED):
                return leaf
            raise ConfigError(
                f"a minibatch is to be cut into microbatches, and it holds a {_kind(leaf)}",
                remedy=f"{_REMEDY}; a class of your own can be made a node of the tree by "
                "torch.utils._pytree.register_pytree_node",
            )

        return pytree.tree_map(cut, batch, is_leaf=_is_leaf)


def _rows(tensor: Tensor, first: int, last: int) -> Tensor:
    """A view with a version counter of its own: a step may write to one part of its batch."""
    return (tensor if tensor.requires_grad else tensor.data)[first:last]


def _sparse(
    tensor: SparseTensor, first: int, last: int, sites: dict[int, tuple[Tensor, Tensor]]
) -> SparseTensor:
    """The sites of some samples; ``sites``: rows and coordinates, by the whole's coordinates."""
    if id(tensor.coords) not in sites:
        batch_N = tensor.coords[:, 0]
        rows = ((batch_N >= first) & (batch_N < last)).nonzero().squeeze(1)
        coords_N4 = tensor.coords[rows]
        coords_N4[:, 0] -= first
        sites[id(tensor.coords)] = rows, coords_N4
    rows, coords_N4 = sites[id(tensor.coords)]
    return SparseTensor(
        tensor.feats[rows],
        coords_N4,
        stride=tensor.stride,
        spatial_shape=tensor.spatial_shape,
        batch_size=last - first,
    )


def _leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their paths in Python's notation: ``[0]``, ``['image']``."""
    flat, _ = pytree.tree_flatten_with_path(batch, is_leaf=_is_leaf)
    for path, leaf in flat:
        yield pytree.keystr(path), leaf


def _is_leaf(node: Any) -> bool:
    if isinstance(node, SparseTensor):
        return True
    if not isinstance(node, list | tuple) or not node:
        return False
    inside = pytree.tree_leaves(node, is_leaf=lambda x: isinstance(x, SparseTensor))
    return all(isinstance(leaf, _SHARED) for leaf in inside)


def _samples_of(leaf: Any) -> int | None:
    """The number of samples of a leaf; None where it has none."""
    if isinstance(leaf, SparseTensor):
        return leaf.batch_size
    if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim:
        return leaf.shape[0]
    return None


def _sites_of(batch: Any) -> set[int]:
    """Numbers of rows of the sparse tensors, which are numbers of voxels, not of samples."""
    return {len(leaf) for _, leaf in _leaves(batch) if isinstance(leaf, SparseTensor)}


def _kind(value: Any) -> str:
    return "tensor" if type(value) is Tensor else type(value).__name__
