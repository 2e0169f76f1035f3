"""The shapes of the matrix products that a sparse convolution is made of."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsepipe.sparse import Conv3d, KernelSpec
from tests.support.sparse_references import Case

CHANNELS = 8
PRODUCTS = {torch.ops.aten.mm.out, torch.ops.aten.mm.default, torch.ops.aten.addmm_.default}


class Shapes(TorchDispatchMode):
    """Notes the operands' shapes of every matrix product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            self.seen.append(tuple(tuple(a.shape) for a in args[-2:]))
        return function(*args, **(kwargs or {}))


def training_step(layer, seed):
    case = Case((12, 12, 12), 2, 0.3, CHANNELS, 2, KernelSpec.of(3), seed=seed)
    x = case.tensor(torch.float32).to(layer.kernel.dtype)
    x.feats.requires_grad_()
    with Shapes() as shapes:
        layer(x).feats.float().sum().backward()
    return shapes.seen


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (2, 2)])
def test_products_in_16_bits_come_in_few_shapes(size, stride):
    """Each new shape is compiled at first, so batches to come should bring few."""
    layer = Conv3d(CHANNELS, 12, size, stride=stride).bfloat16()
    known = {shape for seed in range(8) for shape in training_step(layer, seed)}
    later = [shape for seed in range(8, 16) for shape in training_step(layer, seed)]
    assert len(later) >= 8 * 2 * size**3
    new = [shape for shape in later if shape not in known]
    assert len(new) <= 0.03 * len(later)
