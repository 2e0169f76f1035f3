"""The same convolutions on other sparse libraries, where they can be imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsepipe.sparse import SparseTensor

Work = list[tuple[Callable[[Any], Any], Any, Tensor, Tensor]]
"""Per layer: the convolution, its input, that input's features and its output's gradient."""


def peer_rows(
    inputs: Sequence[tuple[SparseTensor, int]],
) -> dict[str, Callable[[], None]]:
    """Steps by row name, kernel maps built before; absent libraries have no row.

    Args:
        inputs: per convolution the sparse input and the number of output channels.
    """
    rows: dict[str, Callable[[], None]] = {}
    for module, make in (("spconv", _spconv), ("MinkowskiEngine", _minkowski)):
        try:
            work = make(inputs)
        except ImportError as error:
            print(f"{module} has no row: {error}")
            continue
        # Asked of the module: spconv's distributions are named after their CUDA version.
        version = getattr(importlib.import_module(module), "__version__", "of unknown version")
        rows[f"{module} {version} (1 thread)"] = on_one_thread(functools.partial(_run, work))
    return rows


def on_one_thread(step: Callable[[], object]) -> Callable[[], None]:
    """The step with one thread, whatever the others run with."""

    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            step()
        finally:
            torch.set_num_threads(threads)

    return run


def _run(work: Work) -> None:
    outputs = [conv(x) for conv, x, _, _ in work]
    for (conv, _, feats, grad), out in zip(reversed(work), reversed(outputs), strict=True):
        out.backward(grad)
        feats.grad = None
        for parameter in conv.parameters():  # type: ignore[attr-defined]
            parameter.grad = None


class _FeaturesOf(torch.nn.Module):
    """A peer's convolution that returns features only."""

    def __init__(self, conv: torch.nn.Module, attribute: str) -> None:
        super().__init__()
        self.conv, self.attribute = conv, attribute

    def forward(self, x: Any) -> Tensor:
        feats: Tensor = getattr(self.conv(x), self.attribute)
        return feats


def _spconv(inputs: Sequence[tuple[SparseTensor, int]]) -> Work:
    spconv = importlib.import_module("spconv.pytorch")
    if not torch.cuda.is_available():
        # Its backward asks for a CUDA stream even where it goes on to compute on the CPU.
        importlib.import_module("spconv.pytorch.ops").get_current_stream = lambda: 0  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    work: Work = []
    levels: dict[int, Any] = {}
    for x, width in inputs:
        feats = x.feats.detach().clone().requires_grad_(x.feats.requires_grad)
        if id(x.cache) not in levels:
            shape = list(x.spatial_shape or ())
            levels[id(x.cache)] = spconv.SparseConvTensor(feats, x.coords, shape, x.batch_size)
        algo = spconv.ConvAlgo.Native
        size = x.feats.shape[1], width, 3
        conv = spconv.SubMConv3d(*size, bias=False, indice_key="map", algo=algo)
        layer = _FeaturesOf(conv, "features")
        tensor = levels[id(x.cache)].replace_feature(feats)
        layer(tensor)  # makes the pairs of this level, kept under the key
        work.append((layer, tensor, feats, torch.randn(len(x), width)))
    return work


def _minkowski(inputs: Sequence[tuple[SparseTensor, int]]) -> Work:
    engine = importlib.import_module("MinkowskiEngine")
    work: Work = []
    levels: dict[int, Any] = {}
    for x, width in inputs:
        feats = x.feats.detach().clone().requires_grad_(x.feats.requires_grad)
        known = levels.get(id(x.cache))
        if known is None:
            tensor = engine.SparseTensor(feats, coordinates=x.coords)
            levels[id(x.cache)] = tensor
        else:
            tensor = engine.SparseTensor(
                feats,
                coordinate_map_key=known.coordinate_map_key,
                coordinate_manager=known.coordinate_manager,
            )
        conv = engine.MinkowskiConvolution(x.feats.shape[1], width, kernel_size=3, dimension=3)
        layer = _FeaturesOf(conv, "F")
        layer(tensor)
        work.append((layer, tensor, feats, torch.randn(len(x), width)))
    return work
