"""Convolutions of shards: halos are moved, in the forward and again in the backward pass.

What is saved for the backward pass is the shard without halo and padding: with these, P ranks would
save more than one process has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepipe.spatial.grid import Grid, Move, fetch, give_back
from sparsepipe.spatial.intervals import Window, shares, window_exchanges
from sparsepipe.spatial.shard import Shard, alike, function_rule, local_of, without_rule


@dataclass(frozen=True, slots=True)
class Halo:
    """What a layer does to its shard before it computes: moves along axes, then padding.

    Args:
        moves: one for each axis of the grid.
        padding: positions of padding, for ``torch.nn.functional.pad``: a pair for each of the last
            dimensions, the last one first.
        full: sizes of the whole output along the grid's axes.
    """

    moves: tuple[Move, ...]
    padding: tuple[int, ...]
    full: tuple[int, ...]


def halo_of(shard: Shard, windows: Sequence[Window]) -> Halo:
    """What outputs of a layer with ``windows``, one for each of the last dimensions, need.

    Raises:
        ConfigError: the sample is cut along a dimension that is none of the last, or its output
            has no position.
    """
    grid, count = shard.grid, len(windows)
    # What a transposed window pads is cut from its outputs.
    pads = [(0, 0) if window.transposed else (window.before, window.after) for window in windows]
    moves, full = [], []
    for axis, (dim, size) in enumerate(zip(shard.dims, shard.full, strict=True)):
        if -dim > count:
            raise without_rule(f"a layer over the last {count} dimensions", why=", cut elsewhere")
        window, place = windows[count + dim], grid.coordinate(axis)
        parts, outputs = grid.shape[axis], window.output_size(size)
        mine = shares(outputs, parts)[place]
        moves.append(Move(dim, axis, window_exchanges(window, size, parts)[place]))
        if not window.transposed:
            pads[count + dim] = window.padding(mine, size)
        full.append(outputs)
    padding = tuple(value for pair in reversed(pads) for value in pair)
    return Halo(tuple(moves), padding, tuple(full))


def of_each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """PyTorch's short forms: one number for all dimensions, or one for each."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class _Settings:
    """Of a convolution without padding: after moves and padding its shard has all that it needs.

    Args:
        grid: of the shards.
        halo: what is moved and padded before.
        stride: for each of the last dimensions, as ``dilation`` is.
        groups: of channels.
        transposed: whether it is a transposed convolution.
        crops: of a transposed one, for each of the last dimensions: which of the computed outputs
            is the shard's first, and how many the shard has.
    """

    grid: Grid
    halo: Halo
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    crops: tuple[tuple[int, int], ...]

    def prepared(self, local: Tensor) -> Tensor:
        """The inputs of this rank's outputs."""
        ready = fetch(local, self.halo.moves, self.grid)
        return F.pad(ready, self.halo.padding) if any(self.halo.padding) else ready

    def computed_shape(self, ready: Tensor, weight: Tensor) -> tuple[int, ...]:
        """The shape of all outputs of ``ready``, before any are cropped."""
        sizes = (
            _window(kernel, stride, dilation, self.transposed).output_size(size) if size else 0
            for size, kernel, stride, dilation in zip(
                ready.shape[2:], weight.shape[2:], self.stride, self.dilation, strict=True
            )
        )
        channels = weight.shape[1] * self.groups if self.transposed else weight.shape[0]
        return (ready.shape[0], channels, *(max(size, 0) for size in sizes))

    def arguments(self) -> tuple[Any, ...]:
        """Of PyTorch's convolution, behind its tensors."""
        none = [0] * len(self.stride)
        return self.stride, none, self.dilation, self.transposed, none, self.groups


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings
    ) -> Tensor:
        ctx.settings, ctx.has_bias = settings, bias is not None
        ctx.save_for_backward(local, weight)
        ready = settings.prepared(local)
        shape = settings.computed_shape(ready, weight)
        if 0 in shape or 0 in ready.shape:
            outputs = ready.new_zeros(shape)
        else:
            stride, padding, dilation, *rest = settings.arguments()
            outputs = torch.ops.aten.convolution.default(
                ready, weight, None if settings.crops else bias, stride, padding, dilation, *rest
            )
        for place, (start, size) in enumerate(settings.crops):
            outputs = _stretch(outputs, 2 + place, start, size)
        if settings.crops and bias is not None:
            outputs = outputs + bias.view(-1, *[1] * len(settings.stride))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        local, weight = ctx.saved_tensors
        settings: _Settings = ctx.settings
        of_bias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = gradient.sum([dim for dim in range(gradient.dim()) if dim != 1])
        ready = settings.prepared(local)
        shape = settings.computed_shape(ready, weight)
        for place, (start, _) in enumerate(settings.crops):
            gradient = _stretch(gradient, 2 + place, -start, shape[2 + place])
        of_ready, of_weight = torch.zeros_like(ready), torch.zeros_like(weight)
        if gradient.numel() and ready.numel():
            of_ready, of_weight, _ = torch.ops.aten.convolution_backward.default(
                gradient, ready, weight, None, *settings.arguments(),
                [*ctx.needs_input_grad[:2], False],
            )  # fmt: skip
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None
        if any(settings.halo.padding):
            of_ready = F.pad(of_ready, [-value for value in settings.halo.padding])
        return give_back(of_ready, settings.halo.moves, settings.grid), of_weight, of_bias, None


def _stretch(value: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Positions ``start`` to ``start + size`` of a dimension, zeros where there are none.

    Its adjoint begins at ``-start`` and has the former size.
    """
    held = value.shape[dim]
    low, high = min(max(start, 0), held), max(min(start + size, held), 0)
    kept = value.narrow(dim, low, max(high - low, 0))
    if (missing := size - kept.shape[dim]) == 0:
        return kept
    front = min(max(-start, 0), missing)
    return F.pad(kept, [0, 0] * (value.dim() - dim - 1) + [front, missing - front])


def _window(kernel: int, stride: int, dilation: int, transposed: bool) -> Window:
    return Window(kernel=kernel, stride=stride, dilation=dilation, transposed=transposed)


def _cast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """As autocast casts what a convolution is given."""
    kind = next(each.device.type for each in tensors if each is not None)
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        each.to(dtype) if each is not None and each.is_floating_point() else each
        for each in tensors
    )


def _run(
    shard: Shard, weight: Tensor, bias: Tensor | None, windows: Sequence[Window], groups: int
) -> Shard:
    batched = local_of(shard)
    if batched.dim() != weight.dim():
        raise without_rule("a convolution of a sample without a batch dimension")
    halo, grid = halo_of(shard, windows), shard.grid
    transposed = windows[0].transposed
    settings = _Settings(
        grid,
        halo,
        stride=tuple(window.stride for window in windows),
        dilation=tuple(window.dilation for window in windows),
        groups=groups,
        transposed=transposed,
        crops=_crops(shard, windows, batched.shape[2:]) if transposed else (),
    )
    local, weight, bias = _cast(batched, weight, bias)  # type: ignore[assignment]
    with torch.autocast(batched.device.type, enabled=False):
        return alike(_Convolution.apply(local, weight, bias, settings), shard, full=halo.full)


def _crops(
    shard: Shard, windows: Sequence[Window], sizes: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    crops = [
        (window.before, window.output_size(size))
        for window, size in zip(windows, sizes, strict=True)
    ]
    for axis, (dim, full) in enumerate(zip(shard.dims, shard.full, strict=True)):
        window = windows[len(windows) + dim]
        mine = shard.grid.held(axis, window.output_size(full))
        first = window.needs(mine, full).start * window.stride - window.before
        crops[len(windows) + dim] = (mine.start - first, mine.size)
    return tuple(crops)


@function_rule(F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d)
def _convolution(
    _: Any,
    input: Shard,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Shard:
    count = weight.dim() - 2
    dilations = of_each(dilation, count)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = [(each // 2, each - each // 2) for each in reach]
    else:
        pads = [(each, each) for each in of_each(0 if isinstance(padding, str) else padding, count)]
    windows = [
        Window(kernel=k, stride=s, before=p[0], after=p[1], dilation=d)
        for k, s, p, d in zip(
            weight.shape[2:], of_each(stride, count), pads, dilations, strict=True
        )
    ]
    return _run(input, weight, bias, windows, groups)


@function_rule(
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
def _transposed_convolution(
    _: Any,
    input: Shard,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Shard:
    count = weight.dim() - 2
    windows = [
        Window(
            kernel=k, stride=s, before=p, after=p, dilation=d, transposed=True, output_padding=o
        )
        for k, s, p, d, o in zip(
            weight.shape[2:],
            of_each(stride, count),
            of_each(padding, count),
            of_each(dilation, count),
            of_each(output_padding, count),
            strict=True,
        )
    ]
    return _run(input, weight, bias, windows, groups)
