"""Activations between layers, as nests of tensors: their copies and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.sparse import CoordinateCache, SparseTensor


def detached(value: Any) -> Any:
    """The value with tensors outside any autograd graph; ``requires_grad`` and kernel maps stay."""
    return _mapped(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def copied(value: Any) -> Any:
    """A copy in the same autograd graph, which a layer may overwrite; kernel maps are kept."""
    return _mapped(torch.clone, value)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    def of(leaf: Any) -> Any:
        if isinstance(leaf, SparseTensor):
            return leaf.replace_feats(change(leaf.feats))
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(of, value, is_leaf=lambda leaf: isinstance(leaf, SparseTensor))


def coordinate_caches(value: Any) -> list[CoordinateCache]:
    """The coordinate cache of each sparse tensor in a value."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, SparseTensor))
    return [leaf.cache for leaf in leaves if isinstance(leaf, SparseTensor)]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors nested in a value; a sparse tensor gives its features and coordinates."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def fresh(value: Any) -> Any:
    """A copy outside any autograd graph and without kernel maps, which are then built anew."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), value)


def crossing_bytes(value: Any) -> int:
    """Bytes of all tensors of a value that crosses a cut, including features and coordinates."""
    return sum(tensor.nbytes for tensor in tensors_in(value))


def differentiable(value: Any) -> list[Tensor]:
    """The tensors of a value that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]
