"""What submanifold convolutions of torchsparse 2.1 compute, stated site by site in plain Python.

torchsparse itself needs CUDA and is on no index. This stand-in states, slowly and on its own terms,
what its sources do with coordinates, offsets, extents and kernel maps; features go through
differentiable torch operations. Where torchsparse is installed, test_torchsparse_cuda.py compares
the real thing.
"""

import itertools
import math
from enum import Enum
from types import SimpleNamespace

import torch


class Caches:
    def __init__(self):
        self.kmaps = {}


class Tensor21:
    def __init__(self, feats, coords, stride=(1, 1, 1), spatial_range=None):
        assert coords.dtype == torch.int32
        assert coords.is_contiguous()
        self.feats, self.coords, self.stride = feats, coords, stride
        self.spatial_range = spatial_range
        self._caches = Caches()


class Dataflow(Enum):
    ImplicitGEMM = 0
    GatherScatter = 1


def offset_list(size):
    """(dx, dy, dz) in torchsparse's order: x fastest for odd volumes, else z fastest."""
    axes = [range(-(k // 2), k // 2 + 1) if k % 2 else range(k) for k in size]
    if math.prod(size) % 2:
        return [(x, y, z) for z in axes[2] for y in axes[1] for x in axes[0]]
    return list(itertools.product(*axes))


class Version21:
    """Batch first, coordinates divided; sites outside the declared grid are dropped."""

    def __init__(self):
        self.default = {"dataflow": Dataflow.GatherScatter, "kmap_mode": "hashmap", "ifsort": True}
        self.built = 0

    def conv3d(self, input, weight, kernel_size, bias, stride, padding, dilation, config, training):
        assert (stride, dilation) == ((1, 1, 1), 1)
        assert config["dataflow"] is Dataflow.ImplicitGEMM
        assert config["kmap_mode"] == "hashmap_on_the_fly"
        assert not config["ifsort"]
        key = input.stride, kernel_size, stride, dilation
        kmap = input._caches.kmaps.get(key)
        if kmap is None:
            kmap = self.build(input, kernel_size, padding, training)
            input._caches.kmaps[key] = kmap
        assert kmap["training"] or not training, "a map without its backward part"
        out = input.feats.new_zeros(len(input.coords), weight.shape[-1])
        for k, row_in, row_out in kmap["pairs"]:
            contribution = (input.feats[row_in] @ weight[k])[None]
            out = out.index_add(0, torch.tensor([row_out]), contribution)
        if bias is not None:
            out = out + bias
        return Tensor21(out, input.coords, input.stride, input.spatial_range)

    def build(self, input, size, padding, training):
        self.built += 1
        reach = [
            d + 2 * p - (k - 1)
            for d, p, k in zip(input.spatial_range[1:], padding, size, strict=True)
        ]
        sites = [tuple(row) for row in input.coords.tolist()]
        table = {site: row for row, site in enumerate(sites)}
        pairs = []
        for row, (b, x, y, z) in enumerate(sites):
            for k, (dx, dy, dz) in enumerate(offset_list(size)):
                at = x + dx, y + dy, z + dz
                inside = all(0 <= c < r for c, r in zip(at, reach, strict=True))
                if inside and (b, *at) in table:
                    pairs.append((k, table[b, *at], row))
        return {"pairs": pairs, "training": training}


def statement():
    """A module-like object with the parts of torchsparse that the adapter uses."""
    engine = Version21()
    return SimpleNamespace(
        SparseTensor=Tensor21,
        backends=SimpleNamespace(allow_tf32=True),
        nn=SimpleNamespace(
            functional=SimpleNamespace(
                conv3d=engine.conv3d,
                Dataflow=Dataflow,
                conv_config=SimpleNamespace(get_default_conv_config=lambda: engine.default),
            )
        ),
        engine=engine,
    )
