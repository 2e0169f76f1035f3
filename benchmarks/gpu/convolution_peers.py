"""Our backends and other sparse convolutions behind one interface: maps, forward, both gradients.

Other libraries order sites and offsets in their own way. Each gets the same numbers in its order,
and :class:`Operations` knows the way back, so that results can be compared.

Shape suffixes: N voxels, K offsets, C input and D output channels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from records import Rows
from sparse_conv import DOWN, LEVELS, WINDOW, Layer, build_maps, fresh
from torch import Tensor
from torch.nn.functional import pad

import sparsepipe
from sparsepipe.sparse import SparseTensor
from sparsepipe.sparse.coordinates import linear_keys
from sparsepipe.sparse.kernel_map import CoordinateCache

_LEAST_CHANNELS = 8
"""Of ocnn: Triton 3.6 cannot compile its weight gradients of up to 4 input channels."""

# The peers' grid: a power of two, so that halving it five times drops no voxel. 50^3 fits into it.
_GRID_BITS = 6
_GRID = (1 << _GRID_BITS,) * 3

# Ours counts offsets with x fastest, the peers with the last axis fastest, which is z. Changing
# one into the other is the same reordering as changing back.
_REVERSED_K = torch.arange(WINDOW.volume).view(WINDOW.size).permute(2, 1, 0).reshape(-1)

Convolve = Callable[[Tensor, Tensor], Tensor]
"""From features and kernel to the output's features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What one layer computes, each alone.

    Attributes:
        forward: the output's features.
        input_gradient: None for the first layer, and where a library has none of its own.
        weight_gradient: of the kernel.
        to_our_rows: reorders rows of the library's sites as ours.
        to_our_kernel: reorders a kernel of the library as ours, [K, C, D].
    """

    forward: Callable[[], Tensor]
    input_gradient: Callable[[], Tensor] | None
    weight_gradient: Callable[[], Tensor]
    to_our_rows: Callable[[Tensor], Tensor] = lambda rows: rows
    to_our_kernel: Callable[[Tensor], Tensor] = lambda kernel: kernel


class Library(Protocol):
    """A sparse convolution.

    Attributes:
        name: as users know it.
        version: of it.
        note: what a reader of its times must know.
        precisions: that it computes in, by their names in rows, the worthiest first.
    """

    name: str
    version: str
    note: str
    precisions: tuple[str, ...]

    def maps(self, batch: SparseTensor) -> Any:
        """Everything that the five levels derive from coordinates, from nothing."""

    def operations(self, maps: Any, depth: int, layer: Layer) -> Operations:
        """The operations of a layer on the level ``depth`` of the maps."""

    def allow_tf32(self, allowed: bool) -> None:
        """Whether products of float32 numbers may be rounded to TF32."""


def apart(
    convolve: Convolve,
    feats_NC: Tensor,
    kernel_KCD: Tensor,
    grad_ND: Tensor,
    *,
    needs_input_gradient: bool,
    **fields: Any,
) -> Operations:
    """Operations by autograd, from two graphs: in each only one operand requires a gradient."""
    feats_NC, kernel_KCD = feats_NC.detach(), kernel_KCD.detach()
    of_feats, of_kernel = (x.clone().requires_grad_() for x in (feats_NC, kernel_KCD))
    out_of_feats = convolve(of_feats, kernel_KCD) if needs_input_gradient else None
    out_of_kernel = convolve(feats_NC, of_kernel)

    def forward() -> Tensor:
        with torch.no_grad():
            return convolve(feats_NC, kernel_KCD)

    def gradient(out: Tensor, of: Tensor) -> Tensor:
        return torch.autograd.grad(out, of, grad_ND, retain_graph=True)[0]

    return Operations(
        forward=forward,
        input_gradient=None if out_of_feats is None else lambda: gradient(out_of_feats, of_feats),
        weight_gradient=lambda: gradient(out_of_kernel, of_kernel),
        **fields,
    )


_HALF: tuple[str, ...] = ("bf16", "fp16", "TF32")


class Ours:
    """A backend of this package, by the name of its option in ``conf/backend``."""

    version = sparsepipe.__version__

    def __init__(self, name: str, *precisions: str) -> None:
        self.name, self.precisions = name, precisions
        self.backend = backend_of(name)
        self.note = "" if name == "native" else "maps with a convolution of 8 channels a level"

    def maps(self, batch: SparseTensor) -> list[CoordinateCache] | None:
        """See :class:`Library`; None for the native backend, whose layers make and keep them."""
        if self.name == "native":
            build_maps(batch)
            return None
        x, caches = fresh(batch), []
        dtype = torch.bfloat16 if "bf16" in self.precisions else torch.float16
        kernel_KCD = torch.ones(WINDOW.volume, 8, 8, dtype=dtype, device=batch.device)
        kernel_KCD.requires_grad_()
        for depth in range(len(LEVELS)):
            feats_NC = kernel_KCD.new_ones(len(x), 8).requires_grad_()
            x = x.replace_feats(feats_NC)
            caches.append(x.cache)
            self.backend.conv3d(x, kernel_KCD, None, WINDOW).feats.sum().backward()
            if depth + 1 < len(LEVELS):
                x = self.backend.max_pool3d(x, DOWN)
        return caches

    def operations(self, maps: Any, depth: int, layer: Layer) -> Operations:
        """See :class:`Library`.

        Raises:
            ValueError: the backend's sites are not those of the native one.
        """
        x = layer.x
        if maps is not None:
            if not torch.equal(maps[depth].coords_N4, x.coords):
                raise ValueError(f"sites of level {depth} are not those of the native backend")
            x = SparseTensor(
                x.feats,
                maps[depth].coords_N4,
                spatial_shape=x.spatial_shape,
                batch_size=x.batch_size,
                cache=maps[depth],
            )
        return apart(
            lambda feats_NC, kernel_KCD: (
                self.backend.conv3d(x.replace_feats(feats_NC), kernel_KCD, None, WINDOW).feats
            ),
            x.feats,
            layer.conv.kernel,
            layer.grad_ND,
            needs_input_gradient=not layer.first,
        )

    def allow_tf32(self, allowed: bool) -> None:
        """Follows torch."""


def backend_of(name: str) -> Any:
    """The backend of an option of ``conf/backend``, without Hydra, which a machine may lack.

    Raises:
        ImportError: there is no such option, or what it imports is absent.
    """
    file = Path(sparsepipe.__file__).parents[1] / "conf" / "backend" / f"{name}.yaml"
    found = (
        re.search(r"^_target_: (\S+)\.(\w+)$", file.read_text(), re.M) if file.exists() else None
    )
    if found is None:
        raise ImportError(f"there is no option conf/backend/{name}.yaml")
    return getattr(importlib.import_module(found[1]), found[2])()


class _SpconvTriton:
    """spconv-triton, whose kernels can be called apart; weights are [D, x, y, z, C]."""

    name = "spconv-triton"
    precisions = _HALF

    def __init__(self) -> None:
        package = importlib.import_module("spconv_triton")
        self._functional: Any = importlib.import_module("spconv_triton.pytorch.functional")
        self._ops: Any = importlib.import_module("spconv_triton.pytorch.ops")
        self._constants: Any = importlib.import_module("spconv_triton.constants")
        self._gemm: Any = importlib.import_module("spconv_triton.pytorch._impl.gemm")
        pairs: Any = importlib.import_module("spconv_triton.pytorch._impl.pair_kernels")
        self.version = getattr(package, "__version__", "unknown")
        tuned = [self._gemm._gather_gemm_kernel, self._gemm._dweight_masked_kernel]
        self.note = "tuned over all {} configurations, weight gradient {}".format(
            *(len(kernel.configs) for kernel in tuned)
        )
        tuned += [kernel for kernel in vars(pairs).values() if hasattr(kernel, "configs")]
        for kernel in tuned:
            kernel._do_bench = _short_trial
            _compile_side_by_side(kernel)

    def maps(self, batch: SparseTensor) -> list[Any]:
        """See :class:`Library`: coordinates, and the pairs of the windows on them, by level."""
        coords_N4, size, levels = batch.coords, _GRID[0], []
        for depth in range(len(LEVELS)):
            if depth:
                coords_N4 = self._pairs(coords_N4, batch, size, window=2, stride=2)[0]
                size //= 2
            pairs = self._pairs(coords_N4, batch, size, window=3, stride=1)
            levels.append((coords_N4, pairs))
        return levels

    def _pairs(
        self, coords_N4: Tensor, batch: SparseTensor, size: int, *, window: int, stride: int
    ) -> Any:
        return self._ops.get_indice_pairs_implicit_gemm(
            coords_N4,
            batch.batch_size,
            [size] * 3,
            self._ops.ConvAlgo.MaskImplicitGemm,
            ksize=[window] * 3,
            stride=[stride] * 3,
            padding=[0] * 3,
            dilation=[1] * 3,
            out_padding=[0] * 3,
            subm=stride == 1,
            is_train=True,
        )

    def operations(self, maps: Any, depth: int, layer: Layer) -> Operations:
        """See :class:`Library`."""
        coords_N4, pairs = maps[depth]
        theirs, back = _matching(layer.x.coords, coords_N4)
        kernel_KCD = layer.conv.kernel.detach()
        kernel_DKC = kernel_KCD[_REVERSED_K].permute(2, 0, 1).contiguous()
        return self._with_pairs(
            pairs,
            layer.x.feats.detach()[theirs],
            kernel_DKC.view(-1, *WINDOW.size, layer.conv.in_channels),
            layer.grad_ND[theirs],
            to_our_rows=lambda rows: rows[back],
            to_our_kernel=lambda kernel: kernel.reshape(kernel_DKC.shape).permute(1, 2, 0)[
                _REVERSED_K
            ],
        )

    def _convolve(self, pairs: Any) -> Convolve:
        (_, _, forward, backward, forward_masks, backward_masks, *rest) = pairs
        forward_order, backward_order, masks = rest

        def convolve(feats_NC: Tensor, kernel: Tensor) -> Tensor:
            out: Tensor = self._functional.implicit_gemm(
                feats_NC,
                kernel,
                forward,
                backward,
                forward_masks,
                backward_masks,
                forward_order,
                backward_order,
                len(feats_NC),
                masks,
                True,
                True,
            )
            return out

        return convolve

    def _with_pairs(
        self, pairs: Any, feats_NC: Tensor, kernel: Tensor, grad_ND: Tensor, **fields: Any
    ) -> Operations:
        convolve, kernel_DKC = self._convolve(pairs), kernel.flatten(1, 3)
        forward_rows, backward_rows = pairs[2:4]

        def forward() -> Tensor:
            with torch.no_grad():
                return convolve(feats_NC, kernel)

        def input_gradient() -> Tensor:
            grad_NC: Tensor = self._gemm.conv_backward_input(
                grad_ND, kernel_DKC, backward_rows, len(feats_NC)
            )
            return grad_NC

        def weight_gradient() -> Tensor:
            grad_DKC: Tensor = self._gemm.conv_backward_weight(
                feats_NC, grad_ND, forward_rows, kernel_DKC.shape
            )
            return grad_DKC

        return Operations(
            forward=forward,
            input_gradient=input_gradient if feats_NC.shape[1] > 1 else None,
            weight_gradient=weight_gradient,
            **fields,
        )

    def allow_tf32(self, allowed: bool) -> None:
        """See :class:`Library`."""
        self._constants.SPCONV_ALLOW_TF32 = allowed


class _Octrees:
    """O-CNN: convolutions on the nodes of an octree that hold points; kernels are [K, C, D]."""

    name = "ocnn"
    precisions = _HALF

    # Of 8 configurations, and of as many divisions of a sum as there are powers of two.
    _TILES = ((128, 128, 32, 4, 4), (128, 64, 32, 4, 4))
    _SPLITS = 2

    def __init__(self) -> None:
        # Tuned here and now, not in an earlier run or for another precision.
        os.environ["OCNN_AUTOSAVE_AUTOTUNE"] = "0"
        os.environ["OCNN_AUTOTUNE_CACHE_PATH"] = os.devnull + "/none"
        with _standing_in_for_torchvision():
            self._octree: Any = importlib.import_module("ocnn.octree")
        self.version = importlib.metadata.version("ocnn")
        self._convolution = importlib.import_module("ocnn.nn.octree_conv_t").octree_conv_triton
        self._config: Any = importlib.import_module("ocnn.nn.kernels.config")
        kernels: dict[str, Any] = {}
        for way in ("fwd", "bwd"):
            for split in ("", "_splitk"):
                name = f"ocnn.nn.kernels.conv_{way}_implicit_gemm{split}"
                kernels |= vars(importlib.import_module(name))
        for name, kernel in kernels.items():
            if name.endswith("_kernel"):
                kept = _limit_tuning(kernel, self._TILES)
        self._splits = [
            kernels[f"conv_{way}_implicit_gemm_splitk"]
            for way in ("fwd", "bwd_input", "bwd_weight")
        ]
        for split in self._splits:
            split.config_fn = _first(split.config_fn, self._SPLITS)
        self.note = f"tuned over {kept} configurations and {self._SPLITS} splits; "
        self.note += f"layer 1 padded to {_LEAST_CHANNELS} channels"

    def maps(self, batch: SparseTensor) -> Any:
        """See :class:`Library`: an octree whose nodes at the depths 6 to 2 are the five levels."""
        bits = _GRID_BITS
        points_N3 = (batch.coords[:, 1:].float() + 0.5) / (1 << (bits - 1)) - 1
        points = self._octree.Points(
            points_N3, batch_id=batch.coords[:, 0].long(), batch_size=batch.batch_size
        )
        octree = self._octree.Octree(bits, batch_size=batch.batch_size, device=batch.coords.device)
        octree.build_octree(points)
        octree.construct_all_neigh()
        for depth in range(len(LEVELS)):
            octree.get_neigh(bits - depth, "333", 1, True)
        return octree

    def operations(self, maps: Any, depth: int, layer: Layer) -> Operations:
        """See :class:`Library`."""
        for split in self._splits:  # which distinguish no precisions
            split.cache.clear()
        x, y, z, b = maps.xyzb(_GRID_BITS - depth, True)
        coords_N4 = torch.stack([b, x, y, z], dim=1).int()
        theirs, back = _matching(layer.x.coords, coords_N4)
        neighbours_NK = maps.get_neigh(_GRID_BITS - depth, "333", 1, True)
        channels = layer.conv.in_channels
        padding = max(0, _LEAST_CHANNELS - channels)
        return apart(
            lambda feats_NC, kernel_KCD: self._convolution(
                feats_NC, kernel_KCD.permute(2, 0, 1), None, neighbours_NK
            ),
            pad(layer.x.feats.detach()[theirs], (0, padding)),
            pad(layer.conv.kernel.detach()[_REVERSED_K], (0, 0, 0, padding)),
            layer.grad_ND[theirs],
            needs_input_gradient=not layer.first,
            to_our_rows=lambda rows: rows[back],
            to_our_kernel=lambda kernel: kernel[_REVERSED_K, :channels],
        )

    def allow_tf32(self, allowed: bool) -> None:
        """See :class:`Library`."""
        self._config.allow_tf32 = allowed


LIBRARIES: Mapping[str, Callable[[], Library]] = {
    "triton": lambda: Ours("triton", *_HALF),
    "spconv-triton": _SpconvTriton,
    "spconv_triton": lambda: Ours("spconv_triton", *_HALF),
    "ocnn": _Octrees,
    "torchsparse": lambda: Ours("torchsparse", "fp16", "TF32"),
}
"""Makers of what computes on a GPU only, in order of worth: ours by the names of their options."""


def present(rows: Rows, names: Iterable[str], *, on_cuda: bool) -> list[Library]:
    """Libraries that can be measured; each of the others gets a row that says why not."""
    found: list[Library] = []
    for name in names:
        try:
            if not on_cuda:
                raise ImportError("it computes on a GPU only")
            found.append(LIBRARIES[name]())
        except Exception as error:  # whatever stops another library stops nothing here
            missing = f"{type(error).__name__}: {error}"[:300]
            rows.measure(name, partial(dict, library=name, missing=missing))
    return found


def _matching(ours_N4: Tensor, theirs_N4: Tensor) -> tuple[Tensor, Tensor]:
    """Our row of each of their sites, and their row of each of ours."""
    if ours_N4.shape != theirs_N4.shape:
        raise ValueError(f"{len(theirs_N4)} sites where ours are {len(ours_N4)}")
    order_ours, order_theirs = (linear_keys(c, _GRID).argsort() for c in (ours_N4, theirs_N4))
    if not torch.equal(ours_N4[order_ours], theirs_N4[order_theirs]):
        raise ValueError("its sites are not ours")
    theirs, back = torch.empty_like(order_ours), torch.empty_like(order_ours)
    theirs[order_theirs], back[order_ours] = order_ours, order_theirs
    return theirs, back


def _limit_tuning(kernel: Any, tiles: tuple[tuple[int, ...], ...]) -> str:
    """Leaves a Triton kernel only these tiles to try, and short trials; tells how many of how many.

    Args:
        kernel: tuned by Triton's autotuner.
        tiles: the first three block sizes in the kernel's order, warps and stages; where two
            configurations agree in them the first is taken.
    """
    known: dict[tuple[int, ...], Any] = {}
    for config in kernel.configs:
        key = (*list(config.kwargs.values())[:3], config.num_warps, config.num_stages)
        known.setdefault(key, config)
    total = len(kernel.configs)
    # Cards for which a library has its own list may know none of these.
    kernel.configs = [known[tile] for tile in tiles if tile in known] or kernel.configs[:2]
    kernel._do_bench = _short_trial
    return f"{len(kernel.configs)} of {total}"


def _compile_side_by_side(kernel: Any) -> None:
    """Has a Triton kernel's tuner compile all configurations on all cores before it tries each."""
    modes: Any = importlib.import_module("triton.runtime._async_compile")
    pruned = kernel.prune_configs

    def compiled(kwargs: Mapping[str, Any]) -> list[Any]:
        configs: list[Any] = pruned(kwargs)
        given = {**kernel.nargs, **kwargs}
        given.pop("warmup", None)
        # What cannot be compiled here fails again, and is left out, when it is tried.
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            modes.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for config in configs:
                kernel.fn.warmup(**given, **config.all_kwargs())
        return configs

    kernel.prune_configs = compiled


def _short_trial(call: Callable[[], object], quantiles: Any) -> Any:
    testing: Any = importlib.import_module("triton.testing")
    try:
        return testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)
    except RuntimeError as error:
        if "PassManager" not in str(error):
            raise
        return [math.inf] * len(quantiles)  # this Triton cannot compile it: another one is taken


def _first(choices: Callable[..., list[Any]], count: int) -> Callable[..., list[Any]]:
    return lambda *args, **kwargs: choices(*args, **kwargs)[:count]


@contextmanager
def _standing_in_for_torchvision() -> Iterator[None]:
    """O-CNN imports torchvision for a network that is not used here; it may be absent."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    models: Any = types.ModuleType("torchvision.models")
    models.resnet18 = None
    sys.modules |= {"torchvision": types.ModuleType("torchvision"), "torchvision.models": models}
    try:
        yield
    finally:
        del sys.modules["torchvision"], sys.modules["torchvision.models"]
