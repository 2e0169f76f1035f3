"""Small networks that draw while they train."""

from __future__ import annotations

from torch import nn

from sparsepipe.models.vgg import sparse_vgg
from tests.support.pipeline_cases import CLASSES


def drop_layers() -> nn.Sequential:
    """Without batch norms, so that microbatches of one sample will do; draws in three layers."""
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Dropout(0.3),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Linear(16, 12),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(12, CLASSES),
    )


def sparse_drop_layers() -> nn.Sequential:
    return sparse_vgg(11, CLASSES, width=1 / 16, dropout=0.5)


def norm_drop_layers() -> nn.Sequential:
    """With batch norms, draws, and a layer that works in place on what a norm has made."""
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 12, bias=False),
        nn.BatchNorm1d(12, momentum=None),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(12, CLASSES),
    )
