"""Layers on which the Triton backend is compared with the native one in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsepipe.sparse import KernelSpec, NativeBackend, SparseTensor

NATIVE = NativeBackend()
READING = ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "numpy")


@dataclass(frozen=True)
class Case:
    spec: KernelSpec
    channels: int
    width: int
    dtype: torch.dtype = torch.float32
    share: float = 0.3
    extent: tuple[int, int, int] = (5, 4, 6)
    has_bias: bool = False

    @property
    def tolerance(self) -> float:
        return {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}[self.dtype]


def sites(case: Case, *, batch_size: int = 3, seed: int = 0) -> Tensor:
    """A share of the grids of all samples but the second, which is empty, in random order."""
    random = torch.Generator().manual_seed(seed)
    every = torch.cartesian_prod(torch.arange(batch_size), *map(torch.arange, case.extent))
    every = every[every[:, 0] != 1]
    some = every[torch.rand(len(every), generator=random) < case.share].int()
    return some[torch.randperm(len(some), generator=random)]


def scattered(case: Case, *, batch_size: int, seed: int) -> SparseTensor:
    """A minibatch in the order of its samples, as a loader makes it, with random features."""
    coords = sites(case, batch_size=batch_size, seed=seed)
    coords = coords[coords[:, 0].argsort(stable=True)]
    random = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(coords), case.channels, generator=random).to(case.dtype)
    return SparseTensor(feats, coords, spatial_shape=case.extent, batch_size=batch_size)


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest number."""
    if not expected.numel():
        return 0.0 if found.shape == expected.shape else float("inf")
    return float((found.cpu().double() - expected).abs().max() / expected.abs().max().clamp(1e-9))


def convolution_distances(
    case: Case, backend: Any, device: str = "cpu", seed: int = 0
) -> list[float]:
    """Returns the distances of the output, and of the gradients of features, kernel and bias."""
    random = torch.Generator().manual_seed(seed)
    coords = sites(case, seed=seed)
    volume = case.spec.volume
    shapes = [(len(coords), case.channels), (volume, case.channels, case.width), (case.width,)]
    whole = [torch.randn(shape, generator=random).to(case.dtype) for shape in shapes]
    found = []
    for to, dtype, by in ((device, case.dtype, backend), ("cpu", torch.float64, NATIVE)):
        leaves = [each.to(to, dtype).requires_grad_() for each in whole[: 2 + case.has_bias]]
        x = SparseTensor(leaves[0], coords.to(to), spatial_shape=case.extent, batch_size=3)
        out = by.conv3d(x, leaves[1], leaves[2] if case.has_bias else None, case.spec).feats
        pulled = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, pulled.to(case.dtype).to(out))])
    return [
        distance(each.detach(), expected.detach()) for each, expected in zip(*found, strict=True)
    ]


def transposed_distances(
    case: Case, backend: Any, device: str = "cpu", *, to_like: bool
) -> list[float]:
    """Returns these distances of a transposed or (``to_like``) an inverse convolution."""
    random = torch.Generator().manual_seed(0)
    coords = sites(case)
    kernel = torch.randn(case.spec.volume, case.channels, case.width, generator=random)
    bias = torch.randn(case.width, generator=random)
    found = []
    for to, dtype, by in ((device, case.dtype, backend), ("cpu", torch.float64, NATIVE)):
        like = SparseTensor(
            torch.ones(len(coords), 1, device=to, dtype=dtype), coords.to(to),
            spatial_shape=case.extent, batch_size=3,
        )  # fmt: skip
        ones = torch.ones(case.spec.volume, 1, 1, device=to, dtype=dtype)
        x = by.conv3d(like, ones, None, case.spec)
        feats = torch.linspace(-1, 1, len(x) * case.channels).view(len(x), -1).sin()
        whole = (feats, kernel, bias)[: 2 + case.has_bias]
        leaves = [each.to(case.dtype).to(to, dtype).requires_grad_() for each in whole]
        out = by.conv_transpose3d(
            x.replace_feats(leaves[0]), leaves[1], leaves[2] if case.has_bias else None, case.spec,
            like=like if to_like else None,
        ).feats  # fmt: skip
        pulled = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, pulled.to(case.dtype).to(out))])
    return [
        distance(each.detach(), expected.detach()) for each, expected in zip(*found, strict=True)
    ]


def pool_distances(
    pool: Callable[[Any, SparseTensor], Any], backend: Any, case: Case, device: str = "cpu"
) -> list[float]:
    """Returns the distances of output and gradient; features repeat, so that maxima are shared."""
    coords = sites(case)
    coords = coords[coords[:, 0].argsort(stable=True)]
    whole = torch.randint(-2, 3, (len(coords), case.channels)).to(case.dtype)
    found = []
    for to, dtype, by in ((device, case.dtype, backend), ("cpu", torch.float64, NATIVE)):
        feats = whole.to(to, dtype).requires_grad_()
        x = SparseTensor(feats, coords.to(to), spatial_shape=case.extent, batch_size=3)
        by.max_pool3d(x, KernelSpec.for_pooling(2))  # so that a level was made
        out = pool(by, x)
        pulled = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append([out, torch.autograd.grad(out, feats, pulled.to(case.dtype).to(out))[0]])
    return [
        distance(each.detach(), expected.detach()) for each, expected in zip(*found, strict=True)
    ]


class _Reads(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.counts["read-backs"] += name in READING
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts launches of kernels, by name, and read-backs to the host."""
    from triton.runtime.interpreter import GridExecutor

    counts: Counter[str] = Counter()
    run = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__] += 1
        # The interpreter itself reads tensors, which a GPU does not.
        with torch._C.DisableTorchFunction():
            return run(self, *args, **kwargs)

    GridExecutor.__call__ = call
    try:
        with _Reads(counts):
            yield counts
    finally:
        GridExecutor.__call__ = run
