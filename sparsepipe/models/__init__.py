"""Networks as ordered lists of layers, and the LightningModule that trains them.

There is no parallel code here: a network is an ``nn.Sequential`` whose entries are the unit of
profiling and partitioning, and the LightningModule is written as for one device.
"""

from sparsepipe.models.classifier import Classifier, LRSchedule
from sparsepipe.models.cnn import cnn_5x5
from sparsepipe.models.cnn_nd import cnn1d, cnn2d, cnn3d
from sparsepipe.models.convnext import (
    convnext_base,
    convnext_large,
    convnext_small,
    convnext_tiny,
    convnext_xl,
)
from sparsepipe.models.densenet import densenet3d
from sparsepipe.models.domain_losses import DomainLosses
from sparsepipe.models.domain_separation import DomainSeparation
from sparsepipe.models.dsn import dsn_2d, dsn_3d, dsn_sparse
from sparsepipe.models.fcn import fcn2d
from sparsepipe.models.resnet import sparse_resnet18, sparse_resnet34, sparse_resnet50
from sparsepipe.models.unet import unet3d
from sparsepipe.models.vgg import (
    dense_vgg11_bn,
    dense_vgg13_bn,
    dense_vgg16_bn,
    dense_vgg19_bn,
    sparse_vgg11_bn,
    sparse_vgg13_bn,
    sparse_vgg16_bn,
    sparse_vgg19_bn,
)

__all__ = [
    "Classifier",
    "DomainLosses",
    "DomainSeparation",
    "LRSchedule",
    "cnn1d",
    "cnn2d",
    "cnn3d",
    "cnn_5x5",
    "convnext_base",
    "convnext_large",
    "convnext_small",
    "convnext_tiny",
    "convnext_xl",
    "dense_vgg11_bn",
    "dense_vgg13_bn",
    "dense_vgg16_bn",
    "dense_vgg19_bn",
    "densenet3d",
    "dsn_2d",
    "dsn_3d",
    "dsn_sparse",
    "fcn2d",
    "sparse_resnet18",
    "sparse_resnet34",
    "sparse_resnet50",
    "sparse_vgg11_bn",
    "sparse_vgg13_bn",
    "sparse_vgg16_bn",
    "sparse_vgg19_bn",
    "unet3d",
]
