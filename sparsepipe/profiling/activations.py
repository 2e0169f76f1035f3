"""What passes from one layer to the next: its tensors, its bytes, its way back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from sparsepipe.sparse import SparseTensor


def detached(value: Any) -> Any:
    """The same values, as leaves that want gradients; what was derived from them is kept."""
    if isinstance(value, SparseTensor):
        return value.replace_feats(_leaf(value.feats))
    return pytree.tree_map(_detached, value, is_leaf=_is_sparse)


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, SparseTensor):
        return detached(leaf)
    return _leaf(leaf) if isinstance(leaf, Tensor) else leaf


def _is_sparse(value: Any) -> bool:
    return isinstance(value, SparseTensor)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def fresh(value: Any) -> Any:
    """The same values, without what was derived from them: kernel maps are built anew."""
    return pytree.tree_map(lambda leaf: leaf, value)


def crossing_bytes(value: Any) -> int:
    """Of all tensors that cross a cut: features and coordinates."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def differentiable(value: Any) -> list[Tensor]:
    """Tensors of a value through which gradients flow."""
    return [
        leaf
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
