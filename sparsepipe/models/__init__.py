"""Networks as ordered lists of layers, and the LightningModule that trains them.

There is no parallel code here: a network is an ``nn.Sequential`` whose entries are the unit of
profiling and partitioning, and the LightningModule is written as for one device.
"""

from sparsepipe.models.classifier import Classifier, LRSchedule
from sparsepipe.models.cnn import cnn_5x5
from sparsepipe.models.resnet import sparse_resnet18, sparse_resnet34, sparse_resnet50
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
    "LRSchedule",
    "cnn_5x5",
    "dense_vgg11_bn",
    "dense_vgg13_bn",
    "dense_vgg16_bn",
    "dense_vgg19_bn",
    "sparse_resnet18",
    "sparse_resnet34",
    "sparse_resnet50",
    "sparse_vgg11_bn",
    "sparse_vgg13_bn",
    "sparse_vgg16_bn",
    "sparse_vgg19_bn",
]
