"""torchsparse 2.1 (Tang et al., MLSys 2022 and MICRO 2023) as a backend, on CUDA."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sparsepipe.errors import BackendError
from sparsepipe.sparse.backends.native import NativeBackend, operands
from sparsepipe.sparse.kernel_map import CoordinateCache
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor

_NATIVE = NativeBackend()
_kernel_maps: WeakKeyDictionary[CoordinateCache, dict[bool, Any]] = WeakKeyDictionary()
"""torchsparse's own kernel maps of each level, for training (True) and inference (False)."""


@dataclass(frozen=True)
class TorchSparseBackend(NativeBackend):
    """Convolves with torchsparse if a window is submanifold and of odd size, otherwise natively.

    Computes in float32 and float16. Output sites, weights and results equal those of the native
    backend. Strided and dilated windows, even sizes and max pooling are native, because torchsparse
    has different output sites or offsets for them, or lacks them. In float32, TF32 is used only
    where ``torch.set_float32_matmul_precision`` allows it.

    Raises:
        BackendError: torchsparse is not installed.
    """

    name: ClassVar[str] = "torchsparse"

    def __post_init__(self) -> None:
        # Importing torchsparse initialises CUDA, which must not happen before a fork.
        if importlib.util.find_spec("torchsparse") is None:
            raise BackendError(
                "torchsparse is not installed",
                remedy="use backend=native, or build torchsparse 2.1 from its sources with CUDA:"
                " https://github.com/mit-han-lab/torchsparse",
            )

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """See :class:`~sparsepipe.sparse.Backend`.

        Raises:
            BackendError: the tensor is not on CUDA, torchsparse cannot be imported or is older
                than 2.1, or the dtype or shape is not supported.
        """
        if x.device.type != "cuda":
            raise BackendError(
                f"torchsparse runs on CUDA only, but the tensor is on {x.device}",
                remedy="use backend=native, or run on a GPU",
            )
        try:
            import torchsparse
            import torchsparse.backend
            import torchsparse.nn.functional
        except Exception as error:  # the import queries the CUDA device and loads a binary
            raise BackendError(
                f"torchsparse cannot be imported: {error}",
                remedy="use backend=native, or build torchsparse for the installed torch"
                f" {torch.__version__}",
            ) from error
        if not hasattr(torchsparse.backend, "GPUHashTable"):  # 2.1 still calls itself 2.0
            raise BackendError(
                f"this torchsparse {torchsparse.__version__} is older than 2.1",
                remedy="build torchsparse 2.1, or use backend=native",
            )
        return convolve(torchsparse, x, kernel, bias, spec)


def convolve(
    module: Any, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
) -> SparseTensor:
    """Convolves with torchsparse (``module``), or natively where its result would differ."""
    is_dilated = any(d > 1 and k > 1 for d, k in zip(spec.dilation, spec.size, strict=True))
    if not spec.is_symmetric or is_dilated or spec.volume == 1 or not len(x):
        return _NATIVE.conv3d(x, kernel, bias, spec)
    feats, kernel, bias = operands(x.feats, kernel, bias, spec)
    if feats.dtype not in (torch.float32, torch.float16):
        raise BackendError(
            f"torchsparse cannot convolve {feats.dtype} features",
            remedy="use float32 or float16 (trainer.precision=16-true, 32-true), or backend=native",
        )
    x.cache.check()
    training = torch.is_grad_enabled()  # maps built for inference lack the backward's tables
    tensor = module.SparseTensor(
        feats, x.coords, stride=x.stride, spatial_range=(x.batch_size, *x.cache.extent)
    )
    tensor._caches = type(tensor._caches)()  # else shared by all tensors in its global cache mode
    tensor._caches.kmaps = _kernel_maps.setdefault(x.cache, {True: {}, False: {}})[training]
    functional = module.nn.functional
    config = functional.conv_config.get_default_conv_config().copy()
    config["dataflow"] = functional.Dataflow.ImplicitGEMM
    config["kmap_mode"] = "hashmap_on_the_fly"
    config["ifsort"] = False  # its bit masks hold 32 offsets, but a 5^3 window has 125
    # A global option that stays as set, because the backward pass reads it as well.
    module.backends.allow_tf32 = (
        torch.get_float32_matmul_precision() != "highest"
        and x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
    out = functional.conv3d(
        tensor,
        kernel,
        kernel_size=spec.size,
        bias=bias,
        stride=spec.stride,
        dilation=1,
        padding=spec.before,
        training=training,
        config=config,
    )
    return x.replace_feats(_DifferentiableOnce.apply(out.feats))  # type: ignore[no-untyped-call]


class _DifferentiableOnce(torch.autograd.Function):
    """Identity that refuses a second derivative, which torchsparse's backward silently loses."""

    @staticmethod
    def forward(ctx: Any, feats: Tensor) -> Tensor:
        return feats.view_as(feats)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise BackendError(
                "torchsparse's convolutions have no second derivative, which create_graph=True "
                "requires (in a gradient penalty, for example)",
                remedy="use backend=native, which has second derivatives, for these layers",
            )
        return gradient
