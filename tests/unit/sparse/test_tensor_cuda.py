"""The tensor between host and CUDA device: pinned, in trees, in pickles, from a loader."""

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from sparsepipe.sparse import KernelSpec, SparseTensor
from tests.support.sparse_references import Case, same

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def x():
    return Case((5, 6, 7), 3, 0.3, 4, 2, KernelSpec.of(3), seed=0).tensor(torch.float32)


def there(moved):
    return moved.feats.device.type == moved.coords.device.type == moved.device.type == DEVICE


@pytest.mark.parametrize("non_blocking", [False, True])
def test_moves_to_cuda_and_back(x, non_blocking):
    pinned = x.pin_memory()
    assert pinned.feats.is_pinned()
    assert pinned.coords.is_pinned()
    moved = pinned.to(DEVICE, non_blocking=non_blocking)
    assert there(moved)
    assert same(moved.to("cpu"), x)


def test_a_tree_of_it_moves_leaf_by_leaf(x):
    moved = pytree.tree_map(lambda leaf: leaf.to(DEVICE), {"x": x, "y": [x.feats]})
    assert isinstance(moved["x"], SparseTensor)
    assert there(moved["x"])
    assert same(moved["x"].to("cpu"), x)
    assert torch.equal(moved["y"][0].cpu(), x.feats)


def test_a_loader_pins_it(x):
    (batch,) = DataLoader([x], batch_size=None, pin_memory=True)
    assert batch.feats.is_pinned()
    assert batch.coords.is_pinned()
    assert same(batch, x)
