"""What torchsparse 2.0 and 2.1 compute, stated site by site in plain Python.

torchsparse itself needs CUDA and is on no index. These two stand-ins state, slowly and
on their own terms, what its sources do with coordinates, offsets, extents, kernel maps
and hash tables; the features go through differentiable torch operations. Where
torchsparse is installed test_torchsparse_cuda.py compares the real thing.
"""

import itertools
import math
from enum import Enum
from types import SimpleNamespace

import torch


def offset_list(size, *, start_of_even):
    """(dx, dy, dz) in torchsparse's order: x fastest for odd volumes, else z fastest."""
    axes = [range(-(k // 2), k // 2 + 1) if k % 2 else start_of_even(k) for k in size]
    if math.prod(size) % 2:
        return [(x, y, z) for z in axes[2] for y in axes[1] for x in axes[0]]
    return list(itertools.product(*axes))


def gather_and_sum(feats, weight, pairs, num_outputs):
    """``pairs`` are (offset index, input row, output row)."""
    out = feats.new_zeros(num_outputs, weight.shape[-1])
    for k, row_in, row_out in pairs:
        contribution = (feats[row_in] @ weight[k])[None]
        out = out.index_add(0, torch.tensor([row_out]), contribution)
    return out


class Caches:
    def __init__(self):
        self.cmaps, self.kmaps, self.hashmaps = {}, {}, {}


new_caches = Caches  # one for all tensors in torchsparse's global cache mode


class Tensor21:
    def __init__(self, feats, coords, stride=(1, 1, 1), spatial_range=None):
        assert coords.dtype == torch.int32
        assert coords.is_contiguous()
        self.feats, self.coords, self.stride = feats, coords, stride
        self.spatial_range = spatial_range
        self._caches = new_caches()


class Tensor20:
    def __init__(self, feats, coords, stride=(1, 1, 1)):
        assert coords.dtype == torch.int32
        self.feats, self.coords, self.stride = feats, coords, stride
        self.cmaps, self.kmaps = {}, {}


class Dataflow(Enum):
    ImplicitGEMM = 0
    GatherScatter = 1


def _sites(coords):
    return [tuple(row) for row in coords.tolist()]


class Version21:
    """Batch first, coordinates divided; sites outside the declared grid are dropped."""

    def __init__(self):
        self.backends = SimpleNamespace(hash_rsv_ratio=2, allow_tf32=True)
        self.default = {"dataflow": Dataflow.GatherScatter, "kmap_mode": "hashmap", "ifsort": True}
        self.built = 0

    def conv3d(self, input, weight, kernel_size, bias, stride, padding, dilation, config, training):
        assert dilation == 1
        assert config["dataflow"] is Dataflow.ImplicitGEMM
        assert config["kmap_mode"] == "hashmap_on_the_fly"
        assert not config["ifsort"]
        key = input.stride, kernel_size, stride, dilation
        kmap = input._caches.kmaps.get(key)
        if kmap is None:
            kmap = self.build(input, kernel_size, stride, padding, training)
            input._caches.kmaps[key] = kmap
        assert kmap["training"] or not training, "a map without its backward part"
        feats = gather_and_sum(input.feats, weight, kmap["pairs"], len(kmap["coords"]))
        if bias is not None:
            feats = feats + bias
        coarse = tuple(a * b for a, b in zip(input.stride, stride, strict=True))
        return Tensor21(feats, kmap["coords"], coarse, kmap["spatial_range"])

    def build(self, input, size, stride, padding, training):
        self.built += 1
        ranges = [
            (d + 2 * p - (k - 1) - 1) // s + 1
            for d, p, k, s in zip(input.spatial_range[1:], padding, size, stride, strict=True)
        ]
        kmap = {"spatial_range": (input.spatial_range[0], *ranges), "training": training}
        submanifold = stride == (1, 1, 1)
        # The table is looked up under the level it describes, kept under the input's.
        level = tuple(a * b for a, b in zip(input.stride, stride, strict=True))
        table = input._caches.hashmaps.get(level)
        capacity = max(512, int(self.backends.hash_rsv_ratio * len(input.coords)))
        build = self.submanifold if submanifold else self.downsample
        kmap["pairs"], kmap["coords"], table = build(
            input, size, stride, padding, ranges, table, capacity
        )
        input._caches.hashmaps[input.stride] = table
        return kmap

    def submanifold(self, input, size, stride, padding, ranges, table, capacity):
        sites = _sites(input.coords)
        if table is None:
            table = {site: row for row, site in enumerate(sites)}
        offsets = offset_list(size, start_of_even=range)
        pairs = []
        for row, (b, x, y, z) in enumerate(sites):
            for k, (dx, dy, dz) in enumerate(offsets):
                at = x + dx, y + dy, z + dz
                inside = all(0 <= c < r for c, r in zip(at, ranges, strict=True))
                if inside and (b, *at) in table:
                    pairs.append((k, table[b, *at], row))
        return pairs, input.coords, table

    def downsample(self, input, size, stride, padding, ranges, table, capacity):
        offsets = offset_list(size, start_of_even=range)
        reads = []
        for row, (b, *site) in enumerate(_sites(input.coords)):
            for k, offset in enumerate(offsets):
                # padding makes the first tap of every axis offset 0
                first = [o + (w // 2 if w % 2 else 0) for o, w in zip(offset, size, strict=True)]
                moved = [c + p - f for c, p, f in zip(site, padding, first, strict=True)]
                if any(m % s for m, s in zip(moved, stride, strict=True)):
                    continue
                out = [m // s for m, s in zip(moved, stride, strict=True)]
                if all(0 <= c < r for c, r in zip(out, ranges, strict=True)):
                    reads.append((k, row, (b, *out)))
        outputs = sorted({site for _, _, site in reads})
        if len(outputs) > capacity:
            raise ValueError("The capacity of hashtable is not sufficient.")
        table = {site: row for row, site in enumerate(outputs)}
        coords = torch.tensor(outputs, dtype=torch.int32).reshape(-1, 4)
        return [(k, row, table[site]) for k, row, site in reads], coords, table


class Version20:
    """Batch last, coordinates multiplied by the stride."""

    def __init__(self):
        self.backends = SimpleNamespace(benchmark=False)
        self.built = 0

    def conv3d(self, input, weight, kernel_size, bias, stride, dilation):
        assert dilation == 1
        key = input.stride, kernel_size, stride, dilation
        if key not in input.kmaps:
            input.kmaps[key] = self.build(input, kernel_size, stride)
        pairs, coords = input.kmaps[key]
        feats = gather_and_sum(input.feats, weight, pairs, len(coords))
        if bias is not None:
            feats = feats + bias
        coarse = tuple(a * b for a, b in zip(input.stride, stride, strict=True))
        return Tensor20(feats, coords, coarse)

    def build(self, input, size, stride):
        self.built += 1
        step = input.stride
        sites = _sites(input.coords)
        outputs = sites
        if stride != (1, 1, 1):
            assert size == stride, "2.0 has other output sites here; must not be called"
            spans = [a * b for a, b in zip(step, stride, strict=True)]
            outputs = sorted(
                {(b, *(c // n * n for c, n in zip(at, spans, strict=True))) for *at, b in sites}
            )
            outputs = [(*at, b) for b, *at in outputs]
        table = {site: row for row, site in enumerate(sites)}
        offsets = offset_list(size, start_of_even=lambda k: range(-k // 2 + 1, k // 2 + 1))
        pairs = []
        for row, (x, y, z, b) in enumerate(outputs):
            for k, (dx, dy, dz) in enumerate(offsets):
                at = x + dx * step[0], y + dy * step[1], z + dz * step[2], b
                if at in table:
                    pairs.append((k, table[at], row))
        return pairs, torch.tensor(outputs, dtype=torch.int32)


def statement_of(version):
    """A module-like object with the parts of torchsparse that the adapter uses."""
    if version == "2.0":
        engine, tensor, backend = Version20(), Tensor20, SimpleNamespace()
        functional = SimpleNamespace(conv3d=engine.conv3d)
    else:
        engine, tensor, backend = Version21(), Tensor21, SimpleNamespace(GPUHashTable=object)
        functional = SimpleNamespace(
            conv3d=engine.conv3d,
            Dataflow=Dataflow,
            conv_config=SimpleNamespace(get_default_conv_config=lambda: engine.default),
        )
    return SimpleNamespace(
        __version__=f"{version}.0",
        SparseTensor=tensor,
        backend=backend,
        backends=engine.backends,
        nn=SimpleNamespace(functional=functional),
        engine=engine,
    )
