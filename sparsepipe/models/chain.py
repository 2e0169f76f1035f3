"""Blocks of layers in a chain, with skips, and checks of the arguments that networks share.

A chain is an ``nn.Sequential`` that a pipeline can split: each entry sees only what the one before
returned. The value between two entries is therefore a tensor, dense or sparse, or a tuple of the
tensor to compute on and those kept for later entries (the latest one last), such as the skips of a
U-Net.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from sparsepipe import sparse
from sparsepipe.errors import ConfigError

X = TypeVar("X", Tensor, sparse.SparseTensor)
Value = Tensor | tuple[Tensor, ...]
"""What an entry of a chain takes and returns: a tensor, alone or with tensors kept for later."""
SparseValue = sparse.SparseTensor | tuple[sparse.SparseTensor, ...]
"""A :data:`Value` of sparse tensors."""
Head = Literal["classification", "segmentation"]
"""What a network labels: each sample (logits [B, K]) or each position ([B, K, *spatial])."""

CONVOLUTIONS: dict[int, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}
NORMS: dict[int, type[_NormBase]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MAX_POOLS: dict[int, type[nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d]] = {
    1: nn.MaxPool1d,
    2: nn.MaxPool2d,
    3: nn.MaxPool3d,
}
_GLOBAL_POOLS: dict[int, Callable[[int], nn.Module]] = {
    1: nn.AdaptiveAvgPool1d,
    2: nn.AdaptiveAvgPool2d,
    3: nn.AdaptiveAvgPool3d,
}
ENTRY_KEEP: dict[str, Literal["input"] | None] = {"classification": None, "segmentation": "input"}
"""What the first block of a network keeps, by head: :class:`Resized` needs the input's size."""
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def input_kind(network: nn.Module) -> str | None:
    """Returns what a network takes, such as ``sparse`` or ``dense 3D``, by its first convolution;
    None if this is in a module of the user's, or follows another layer, which may reshape.
    """
    for module in network.modules():
        if isinstance(module, sparse.Conv3d):
            return "sparse"
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return f"dense {len(module.kernel_size)}D"
        if not (type(module) is nn.Sequential or type(module).__module__.startswith("sparsepipe.")):
            break
    return None


def check_input(given: str | None, taken: str | None) -> None:
    """Raises a ConfigError if data are of another kind than a network takes; None: unknown."""
    if None not in (given, taken) and given != taken:
        raise ConfigError(
            f"the network is {taken}, but its input is {given}",
            remedy=f"choose a model for {given} data, or {taken} data (for meshes and clouds, set "
            "data.representation=sparse or dense)",
        )


def parted(value: X | tuple[X, ...]) -> tuple[X, tuple[X, ...]]:
    """Splits a value into the tensor to compute on and the tensors kept for later entries."""
    return (value[0], tuple(value[1:])) if isinstance(value, tuple | list) else (value, ())


def joined(value: X, kept: tuple[X, ...]) -> X | tuple[X, ...]:
    """Combines the two results of :func:`parted`."""
    return (value, *kept) if kept else value  # type: ignore[arg-type]


class ChainBlock(nn.Sequential):
    """Layers that run one after another on the value of a chain.

    Args:
        layers: each takes a tensor and returns one.
        keep: which tensor to keep for later entries, the block's input or its output; None: none.
        checkpointing: whether to save the input only and compute the layers again in the backward
            pass.
        least: smallest valid size of a dense input along each spatial dimension.
    """

    def __init__(
        self,
        *layers: nn.Module,
        keep: Literal["input", "output"] | None = None,
        checkpointing: bool = False,
        least: int = 1,
    ) -> None:
        super().__init__(*layers)
        self.keep = keep
        self.checkpointing = checkpointing
        self.least = least

    def forward(self, input: Any) -> Any:
        """Returns the output of the layers, with all tensors kept so far."""
        value, kept = parted(input)
        sizes = list(value.shape[2:]) if isinstance(value, Tensor) else []
        if min(sizes, default=self.least) < self.least:
            raise ConfigError(
                f"samples of size {sizes} are too small for the network, which needs at least "
                f"{self.least} along each dimension",
                remedy="use larger samples, or a network with fewer levels of resolution",
            )
        layers: Callable[..., Tensor] = super().forward
        result = recomputed(self, layers, value) if self.checkpointing else layers(value)
        if self.keep is not None:
            kept = (*kept, value if self.keep == "input" else result)
        return joined(result, kept)


class Resized(nn.Module):
    """Interpolates a tensor linearly to the spatial size of the last kept one, and drops that."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, input: Value) -> Value:
        value, kept = parted(input)
        size = list(kept[-1].shape[2:])
        mode = _LINEAR[self.dimensions]
        return joined(F.interpolate(value, size, mode=mode, align_corners=False), kept[:-1])


def recomputed(module: nn.Module, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Returns ``function(*inputs)``, whose intermediate values are computed again in the backward
    pass, with the same random draws and without a second update of ``module``'s batch norms.
    """

    @contextmanager
    def on_copies() -> Iterator[None]:
        norms = [norm for norm in module.modules() if isinstance(norm, _NormBase)]
        kept = [dict(norm._buffers) for norm in norms]
        for norm, buffers in zip(norms, kept, strict=True):
            copies = {name: None if b is None else b.clone() for name, b in buffers.items()}
            norm._buffers.update(copies)
        try:
            yield
        finally:
            for norm, buffers in zip(norms, kept, strict=True):
                norm._buffers.update(buffers)

    result: Tensor = checkpoint(
        function, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), on_copies())
    )
    return result


def convolved(
    dimensions: int, in_channels: int, out_channels: int, kernel_size: int = 3, *, norm: bool = True
) -> list[nn.Module]:
    """Builds a convolution that keeps the spatial size, a batch norm if ``norm``, and a ReLU;
    weights are initialised as in He et al., "Delving Deep into Rectifiers".
    """
    layer = CONVOLUTIONS[dimensions](
        in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=not norm
    )
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return [layer, *([NORMS[dimensions](out_channels)] if norm else []), nn.ReLU()]


def head_entries(
    head: str, dimensions: int, channels: int, num_classes: int, *, dropout: float
) -> list[nn.Module]:
    """Builds the last entries of a network, which take features [B, ``channels``, *spatial].

    Classification: the mean over all positions, dropout and a linear layer. Segmentation: dropout
    and a convolution with kernel size 1, whose logits are interpolated to the size of the input,
    which the first block has kept.
    """
    if head == "classification":
        return [
            _GLOBAL_POOLS[dimensions](1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(channels, num_classes),
        ]
    score = CONVOLUTIONS[dimensions](channels, num_classes, 1)
    return [ChainBlock(nn.Dropout(dropout), score), Resized(dimensions)]


def require(holds: bool, name: str, value: object, valid: str) -> None:
    """Raises a ``ConfigError`` about ``model.<name>`` unless ``holds``; ``valid``: valid values."""
    if not holds:
        raise ConfigError(f"model.{name}={value!r} is not valid", remedy=f"choose {valid}")


def check_sizes(
    num_classes: int,
    *,
    in_channels: int,
    width: float,
    dropout: float = 0.0,
    head: str = "classification",
) -> None:
    """Raises a ``ConfigError`` if one of these arguments, common to most networks, is not valid."""
    require(width > 0, "width", width, "a number above 0, such as 0.5")
    require(0 <= dropout < 1, "dropout", dropout, "a number in [0, 1)")
    require(num_classes >= 1, "num_classes", num_classes, "1 or more")
    require(in_channels >= 1, "in_channels", in_channels, "1 or more")
    heads = "classification (a label for each sample) or segmentation (for each voxel)"
    require(head in get_args(Head), "head", head, heads)


def scaled(channels: int, width: float) -> int:
    """Returns ``channels`` times ``width``, rounded, but at least 1."""
    return max(1, round(channels * width))
