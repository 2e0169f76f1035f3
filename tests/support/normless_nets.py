"""Networks in whose place for each batch norm is nothing, so that no sample depends on others."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.support.pipeline_cases import dense_layers, sparse_layers

GAIN = 3.0
"""Of sparse kernels, lest all vanishes in so many layers."""


def normless_layers() -> nn.Sequential:
    return _without_norms(dense_layers())


def sparse_normless_layers() -> nn.Sequential:
    layers = _without_norms(sparse_layers())
    for name, parameter in layers.named_parameters():
        if name.endswith("kernel"):
            parameter.data *= GAIN
    return layers


def _without_norms(layers: nn.Sequential) -> nn.Sequential:
    for name, module in list(layers.named_modules()):
        if isinstance(module, _BatchNorm):
            layers.set_submodule(name, nn.Identity())
    return layers
