"""Sparse tensors and the layers that act on them."""

from sparsepipe.sparse.addition import add
from sparsepipe.sparse.backends import Backend, NativeBackend
from sparsepipe.sparse.derived import derived_tensors
from sparsepipe.sparse.global_pool import GlobalAvgPool, GlobalMaxPool
from sparsepipe.sparse.kernel_map import CoordinateCache, watching_kernel_maps
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.layers import Conv3d, MaxPool3d
from sparsepipe.sparse.pointwise import BatchNorm, Dropout, Linear, ReLU
from sparsepipe.sparse.tensor import SparseTensor, sparse_collate

__all__ = [
    "Backend",
    "BatchNorm",
    "Conv3d",
    "CoordinateCache",
    "Dropout",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "KernelSpec",
    "Linear",
    "MaxPool3d",
    "NativeBackend",
    "ReLU",
    "SparseTensor",
    "add",
    "derived_tensors",
    "sparse_collate",
    "watching_kernel_maps",
]
