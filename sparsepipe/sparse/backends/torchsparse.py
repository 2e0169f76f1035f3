"""torchsparse (Tang et al., MLSys 2022 and MICRO 2023) behind the backend protocol.

Runs on CUDA in float32 and float16, with torchsparse 2.0 or 2.1 built from its sources.
torchsparse is imported when the first convolution runs.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsepipe.errors import BackendError
from sparsepipe.sparse.backends import torchsparse_convert as convert
from sparsepipe.sparse.backends.native import NativeBackend, at_level, check_kernel_shape
from sparsepipe.sparse.kernel_map import CoordinateCache, check_grid_is_known
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchSparseBackend:
    """Convolutions by torchsparse, max-pooling (which it lacks) by the native backend.

    Output sites, weights and results equal those of the native backend with every supported
    version of torchsparse. Windows that the installed version computes differently (dilated
    ones, for example) go to the native backend, with one warning for each kind. In float32,
    TF32 is used only where ``torch.set_float32_matmul_precision`` allows it.

    Raises:
        BackendError: torchsparse is not installed.
    """

    name: ClassVar[str] = "torchsparse"

    def __post_init__(self) -> None:
        # Importing torchsparse initialises CUDA, which must not happen before a fork.
        if importlib.util.find_spec("torchsparse") is None:
            raise _missing()

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """See :class:`~sparsepipe.sparse.Backend`.

        Raises:
            BackendError: torchsparse is missing or broken, the tensor is not on CUDA, or
                its dtype or shape is not supported.
            CoordinateError: the coordinates are not valid.
        """
        if x.device.type != "cuda":
            raise BackendError(
                f"torchsparse runs on CUDA only, but the tensor is on {x.device}",
                remedy="use backend=native, or run on a GPU",
            )
        return convolve(load_library(), x, kernel, bias, spec)

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """Delegates to :meth:`NativeBackend.max_pool3d`."""
        return NativeBackend().max_pool3d(x, spec)


@dataclass(frozen=True, slots=True)
class Library:
    """An imported torchsparse and the conventions of its version."""

    module: Any
    functional: Any
    convention: convert.Convention

    @classmethod
    def of(cls, module: ModuleType | Any) -> Library:
        """Detect the conventions of an imported torchsparse.

        Raises:
            BackendError: it is older than 2.0.
        """
        version = str(getattr(module, "__version__", "0"))
        if int(version.split(".", maxsplit=1)[0]) < 2:
            raise BackendError(
                f"torchsparse {version} is too old",
                remedy="install torchsparse 2.0 or 2.1, or use backend=native",
            )
        # Development versions of 2.1 also report 2.0, so a feature of 2.1 decides.
        is_2_1 = hasattr(module.backend, "GPUHashTable")
        return cls(module, module.nn.functional, convert.V2_1 if is_2_1 else convert.V2_0)


@functools.cache
def load_library() -> Library:
    """Import torchsparse.

    Raises:
        BackendError: it is not installed, fails to import, or is too old.
    """
    try:
        import torchsparse
        import torchsparse.backend
        import torchsparse.nn.functional
    except ModuleNotFoundError as error:
        if error.name == "torchsparse":
            raise _missing() from error
        raise _broken(error) from error
    except Exception as error:  # the import queries the CUDA device and loads a binary
        raise _broken(error) from error
    return Library.of(torchsparse)


def convolve(
    library: Library, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
) -> SparseTensor:
    """Convolve with ``library``, or natively where its result would differ."""
    if spec.is_pointwise or not len(x):  # a matrix product, or no sites at all
        return NativeBackend().conv3d(x, kernel, bias, spec)
    reason = convert.difference(spec, library.convention)
    if reason is not None:
        _warn_once(f"{reason}: the native backend computes windows {spec}")
        return NativeBackend().conv3d(x, kernel, bias, spec)
    feats, kernel, bias = _operands(x, kernel, bias, spec)
    level = _Level.of(x.cache)
    level.check()
    check_grid_is_known(level, spec)
    _check_cells(level, spec, library.convention)
    weight = convert.to_torchsparse(kernel, spec.size)
    out = _call(library, level, x, (feats, weight, bias), spec)
    if not spec.is_submanifold:
        sx, sy, sz = (a * b for a, b in zip(x.stride, spec.stride, strict=True))
        coords_M4 = convert.coords_from_torchsparse(out.coords, (sx, sy, sz), library.convention)
        level = level.downsampled(spec, coords_M4)
    feats = _DifferentiableOnce.apply(out.feats)  # type: ignore[no-untyped-call]
    return at_level(x, feats, level, spec)


def _check_cells(level: _Level, spec: KernelSpec, convention: convert.Convention) -> None:
    """Refuse strided windows whose output sites torchsparse 2.1 numbers beyond a 32-bit integer.

    ``downsample_cuda.cu`` numbers the cells of the batch's output grid in 64 bits, and reads them
    back in 32.
    """
    if spec.is_submanifold or convention == convert.V2_0:
        return
    outputs = (-(-d // s) for d, s in zip(level.extent, spec.stride, strict=True))
    cells = level.batch_size * math.prod(outputs)
    if cells >= 2**31:
        raise BackendError(
            f"torchsparse 2.1 counts the cells of a strided window's output grid in 32 bits, and "
            f"{level.batch_size} samples of extent {level.extent} have {cells:,} at stride "
            f"{spec.stride}",
            remedy="use backend=native, a smaller batch or a coarser grid (data.resolution)",
        )


class _DifferentiableOnce(torch.autograd.Function):
    """Refuses a second derivative: torchsparse's backward leaves no graph, and none would count."""

    @staticmethod
    def forward(ctx: Any, feats: Tensor) -> Tensor:
        return feats.view_as(feats)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise BackendError(
                "torchsparse's convolutions have no second derivative, which create_graph=True "
                "asks for, as a gradient penalty does",
                remedy="use backend=native for these layers, which has second derivatives",
            )
        return gradient


def _call(
    library: Library,
    level: _Level,
    x: SparseTensor,
    operands: tuple[Tensor, Tensor, Tensor | None],
    spec: KernelSpec,
) -> Any:
    """Convolve operands (features, weight, bias); returns torchsparse's own tensor."""
    feats, weight, bias = operands
    coords_N4 = convert.coords_to_torchsparse(level.coords_N4, x.stride, library.convention)
    # Kernel maps built for inference lack the tables of the backward pass.
    training = torch.is_grad_enabled()
    arguments: dict[str, Any] = {
        "kernel_size": spec.size,
        "bias": bias,
        "stride": spec.stride,
        "dilation": 1,
    }
    if library.convention == convert.V2_0:
        tensor = library.module.SparseTensor(feats, coords_N4, stride=x.stride)
        tensor.kmaps = level.kmaps[training]
        return library.functional.conv3d(tensor, weight, **arguments)
    reach = convert.spatial_range(level.extent, batch_size=x.batch_size, spec=spec)
    tensor = library.module.SparseTensor(feats, coords_N4, stride=x.stride, spatial_range=reach)
    # Kernel maps are kept, hash tables are not: a strided convolution stores the table of its
    # output sites under its input level, where a later window would read the wrong sites.
    tensor._caches = type(tensor._caches)()
    tensor._caches.kmaps = level.kmaps[training]
    arguments |= {
        "padding": convert.padding(spec),
        "training": training,
        "config": _config(library),
    }
    with _settings(library, spec, feats):
        return library.functional.conv3d(tensor, weight, **arguments)


def _config(library: Library) -> Any:
    """Options of torchsparse 2.1 whose output sites and offsets match ours (by its source)."""
    config = library.functional.conv_config.get_default_conv_config().copy()
    config["dataflow"] = library.functional.Dataflow.ImplicitGEMM
    config["kmap_mode"] = "hashmap_on_the_fly"
    config["downsample_mode"] = "spconv"
    config["ifsort"] = False  # its bit masks hold 32 offsets, a 5^3 window has 125
    return config


@contextmanager
def _settings(library: Library, spec: KernelSpec, feats: Tensor) -> Iterator[None]:
    """Set torchsparse's global options for one convolution."""
    backends = library.module.backends
    ratio = backends.hash_rsv_ratio
    # Not restored afterwards, because the backward pass reads it as well.
    backends.allow_tf32 = torch.get_float32_matmul_precision() != "highest" and _has_tf32(
        feats.device
    )
    if not spec.is_submanifold:
        # The hash table then holds the output sites; by default it has room for 2 N.
        backends.hash_rsv_ratio = max(ratio, 2 * convert.most_outputs_per_input(spec))
    try:
        yield
    finally:
        backends.hash_rsv_ratio = ratio


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


class _Level(CoordinateCache):
    """A coordinate cache that also keeps torchsparse's kernel maps.

    Attributes:
        kmaps: torchsparse's own dictionaries, for training (True) and for inference.
    """

    __slots__ = ("_downsampled", "kmaps")

    kmaps: dict[bool, dict[Any, Any]]
    _downsampled: dict[KernelSpec, _Level]

    @classmethod
    def of(cls, cache: CoordinateCache) -> _Level:
        """The cache itself, or a ``_Level`` that shares everything the cache has built so far."""
        if isinstance(cache, cls):
            return cache
        level = cls.__new__(cls)
        for name in CoordinateCache.__slots__:
            if name != "__weakref__":
                setattr(level, name, getattr(cache, name))
        level.kmaps = {True: {}, False: {}}
        level._downsampled = {}
        return level

    def coarser(self, coords_M4: Tensor, extent: tuple[int, int, int]) -> _Level:
        return _Level.of(super().coarser(coords_M4, extent))

    def downsampled(self, spec: KernelSpec, coords_M4: Tensor) -> _Level:
        """The coarser level of a strided window, created once to reuse its kernel maps."""
        if spec not in self._downsampled:
            x, y, z = (-(-d // s) for d, s in zip(self.extent, spec.stride, strict=True))
            self._downsampled[spec] = self.coarser(coords_M4, (x, y, z))
        return self._downsampled[spec]


def _operands(
    x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    feats = x.feats
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        feats, kernel = feats.to(dtype), kernel.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if feats.dtype not in (torch.float32, torch.float16) or kernel.dtype != feats.dtype:
        raise BackendError(
            f"torchsparse cannot convolve {feats.dtype} features with a {kernel.dtype} kernel",
            remedy="use float32 or float16 for both (trainer.precision=16-true or 32-true),"
            " or backend=native",
        )
    check_kernel_shape(feats, kernel, spec)
    return feats, kernel, bias


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _missing() -> BackendError:
    return BackendError(
        "torchsparse is not installed",
        remedy="use backend=native, or build torchsparse from its sources with CUDA:"
        " https://github.com/mit-han-lab/torchsparse",
    )


def _broken(error: Exception) -> BackendError:
    return BackendError(
        f"torchsparse cannot be imported: {error}",
        remedy="use backend=native; torchsparse needs a CUDA device and must be built for the"
        f" installed torch {torch.__version__}",
    )
