"""A sparse U-Net on spconv itself, with the names of layers that Pointcept's SpUNet has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.sparse import SparseTensor


def spconv() -> Any:
    """The module, or a skipped test; on one thread, since its CPU wheel sums wrongly on more."""
    module = pytest.importorskip("spconv.pytorch", reason="spconv, a peer, is not installed")
    # Its backward asks for a CUDA stream even where it goes on to compute on the CPU.
    module.ops.get_current_stream = lambda: 0
    torch.set_num_threads(1)
    return module


class _Block(nn.Module):
    def __init__(self, before: int, after: int, key: str, norm: Any) -> None:
        super().__init__()
        conv, one = _sub(3, key), _sub(1, None)
        same = before == after
        self.proj = nn.Sequential() if same else nn.Sequential(one(before, after), norm(after))
        self.conv1, self.bn1 = conv(before, after), norm(after)
        self.conv2, self.bn2 = conv(after, after), norm(after)

    def forward(self, x: Any) -> Any:
        out = self.conv1(x)
        out = self.conv2(out.replace_feature(self.bn1(out.features).relu()))
        side = x.features
        if len(self.proj):
            side = self.proj[1](self.proj[0](x).features)
        return out.replace_feature((self.bn2(out.features) + side).relu())


def _sub(size: int, key: str | None) -> Any:
    peer = spconv()
    options = {"bias": False, "indice_key": key, "algo": peer.ConvAlgo.Native}
    return lambda before, after: peer.SubMConv3d(before, after, size, **options)


class SpconvUNet(nn.Module):
    """From features [N, C] at coordinates [N, 4] (batch, x, y, z) to logits [N, K].

    Each half of ``channels`` is a level down or up. ``wide_down``: whether the strided convolution
    changes the channels, as in SpUNet; else the first block does, as in MinkUNet.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        channels: Sequence[int],
        blocks: Sequence[int],
        base: int = 32,
        wide_down: bool = True,
        eps: float = 1e-3,
    ) -> None:
        super().__init__()
        peer, half = spconv(), len(channels) // 2
        native = {"bias": False, "algo": peer.ConvAlgo.Native}

        def norm(size: int) -> nn.Module:
            return nn.BatchNorm1d(size, eps=eps, momentum=0.01)

        def run(before: int, after: int, count: int, key: str) -> nn.Module:
            rows = (_Block(after if n else before, after, key, norm) for n in range(count))
            return nn.Sequential(OrderedDict((f"block{n}", row) for n, row in enumerate(rows)))

        self.conv_input = nn.Sequential(_sub(5, "stem")(in_channels, base), norm(base))
        self.down, self.up, self.enc, self.dec = (nn.ModuleList() for _ in range(4))
        sizes = [base, *channels]
        for s in range(half):
            before, after, key = sizes[s], sizes[s + 1], f"spconv{s + 1}"
            between = after if wide_down else before
            conv = peer.SparseConv3d(before, between, 2, stride=2, indice_key=key, **native)
            self.down.append(nn.Sequential(conv, norm(between)))
            self.enc.append(run(between, after, blocks[s], f"subm{s + 1}"))
            lower, upper = sizes[2 * half - s - 1], sizes[2 * half - s]
            inverse = peer.SparseInverseConv3d(lower, upper, 2, indice_key=key, **native)
            self.up.append(nn.Sequential(inverse, norm(upper)))
            self.dec.append(run(upper + sizes[s], upper, blocks[2 * half - s - 1], f"subm{s}"))
        self.final = peer.SubMConv3d(
            sizes[-1], num_classes, 1, bias=True, algo=peer.ConvAlgo.Native
        )

    def forward(self, x: SparseTensor) -> Tensor:
        assert x.spatial_shape is not None
        shape, half = list(x.spatial_shape), len(self.down)
        coords = x.coords.contiguous()  # it reads memory in that order without asking
        value = spconv().SparseConvTensor(x.feats, coords, shape, x.batch_size)

        def normed(layers: Any, value: Any) -> Any:
            out = layers[0](value)
            return out.replace_feature(layers[1](out.features).relu())

        value = normed(self.conv_input, value)
        skips = []
        for s in range(half):
            skips.append(value)
            value = normed(self.down[s], value)
            for block in self.enc[s]:
                value = block(value)
        for s in reversed(range(half)):
            value = normed(self.up[s], value)
            both = torch.cat([value.features, skips[s].features], 1)
            value = value.replace_feature(both)
            for block in self.dec[s]:
                value = block(value)
        logits: Tensor = self.final(value).features
        return logits
