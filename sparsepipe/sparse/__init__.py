"""Sparse tensors and the layers that act on them."""

from sparsepipe.sparse.backends import Backend
from sparsepipe.sparse.backends.auto import AutoBackend
from sparsepipe.sparse.backends.native import NativeBackend
from sparsepipe.sparse.kernel_map import CoordinateCache, derived_tensors, watching_kernel_maps
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.layers import (
    AvgPool3d,
    BatchNorm,
    Conv3d,
    ConvTranspose3d,
    Dropout,
    GlobalAvgPool,
    GlobalMaxPool,
    InstanceNorm,
    InverseConv3d,
    LayerNorm,
    Linear,
    MaxPool3d,
    PerVoxel,
    ReLU,
    SqueezeExcite,
)
from sparsepipe.sparse.points import devoxelize, voxelize
from sparsepipe.sparse.tensor import SparseTensor, add, cat, sparse_collate

__all__ = [
    "AutoBackend",
    "AvgPool3d",
    "Backend",
    "BatchNorm",
    "Conv3d",
    "ConvTranspose3d",
    "CoordinateCache",
    "Dropout",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "InstanceNorm",
    "InverseConv3d",
    "KernelSpec",
    "LayerNorm",
    "Linear",
    "MaxPool3d",
    "NativeBackend",
    "PerVoxel",
    "ReLU",
    "SparseTensor",
    "SqueezeExcite",
    "add",
    "cat",
    "derived_tensors",
    "devoxelize",
    "sparse_collate",
    "voxelize",
    "watching_kernel_maps",
]
