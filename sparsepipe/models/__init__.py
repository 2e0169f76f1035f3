"""Networks and the LightningModules that train them, without code for parallel training.

The entries of a network's ``nn.Sequential`` are the units of profiling and partitioning.
"""

from sparsepipe.models.classifier import Classifier as Classifier
from sparsepipe.models.classifier import LRSchedule as LRSchedule
from sparsepipe.models.cnn import cnn1d as cnn1d
from sparsepipe.models.cnn import cnn2d as cnn2d
from sparsepipe.models.cnn import cnn3d as cnn3d
from sparsepipe.models.cnn import cnn_5x5 as cnn_5x5
from sparsepipe.models.convert import converted as converted
from sparsepipe.models.convnext import convnext_base as convnext_base
from sparsepipe.models.convnext import convnext_large as convnext_large
from sparsepipe.models.convnext import convnext_small as convnext_small
from sparsepipe.models.convnext import convnext_tiny as convnext_tiny
from sparsepipe.models.convnext import convnext_xl as convnext_xl
from sparsepipe.models.densenet import densenet3d as densenet3d
from sparsepipe.models.domain_losses import DomainLosses as DomainLosses
from sparsepipe.models.domain_separation import DomainSeparation as DomainSeparation
from sparsepipe.models.dsn import dsn_2d as dsn_2d
from sparsepipe.models.dsn import dsn_3d as dsn_3d
from sparsepipe.models.dsn import dsn_sparse as dsn_sparse
from sparsepipe.models.fcn import fcn2d as fcn2d
from sparsepipe.models.resnet import sparse_resnet18 as sparse_resnet18
from sparsepipe.models.resnet import sparse_resnet34 as sparse_resnet34
from sparsepipe.models.resnet import sparse_resnet50 as sparse_resnet50
from sparsepipe.models.sparse_unet import minkunet14 as minkunet14
from sparsepipe.models.sparse_unet import minkunet18 as minkunet18
from sparsepipe.models.sparse_unet import minkunet34 as minkunet34
from sparsepipe.models.sparse_unet import sparse_unet as sparse_unet
from sparsepipe.models.sparse_unet import spunet as spunet
from sparsepipe.models.unet import unet3d as unet3d
from sparsepipe.models.vgg import dense_vgg11_bn as dense_vgg11_bn
from sparsepipe.models.vgg import dense_vgg13_bn as dense_vgg13_bn
from sparsepipe.models.vgg import dense_vgg16_bn as dense_vgg16_bn
from sparsepipe.models.vgg import dense_vgg19_bn as dense_vgg19_bn
from sparsepipe.models.vgg import sparse_vgg11_bn as sparse_vgg11_bn
from sparsepipe.models.vgg import sparse_vgg13_bn as sparse_vgg13_bn
from sparsepipe.models.vgg import sparse_vgg16_bn as sparse_vgg16_bn
from sparsepipe.models.vgg import sparse_vgg19_bn as sparse_vgg19_bn
