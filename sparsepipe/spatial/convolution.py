"""Convolutions of shards: halos are moved, in the forward and again in the backward pass.

What is saved for the backward pass is the shard without halo and padding: with these, P ranks would
save more than one process has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepipe.errors import ConfigError
from sparsepipe.spatial.grid import (
    Fetch,
    GiveBack,
    Grid,
    Move,
    fetch,
    fetched,
    give_back,
    pairs,
    without_padding,
)
from sparsepipe.spatial.intervals import Interval, Window, shares, window_exchanges
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    function_rule,
    local_of,
    whole_shape,
    without_rule,
)


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
    sizes = whole_shape(shard)[-count:]
    if any(window.output_size(size) < 1 for window, size in zip(windows, sizes, strict=True)):
        kernels = " x ".join(str(window.reach) for window in windows)
        raise ConfigError(
            f"a layer's window of {kernels} positions does not fit into a sample of "
            f"{' x '.join(map(str, sizes))}",
            remedy="give larger samples, or a model with fewer or smaller windows",
        )
    # What a transposed window pads is cut from its outputs.
    pads = [(0, 0) if window.transposed else (window.before, window.after) for window in windows]
    moves, full = [], []
    for axis, (dim, size) in enumerate(zip(shard.dims, shard.full, strict=True)):
        if -dim > count:
            raise without_rule(
                f"a layer over the last {count} dimensions", why=", which is cut along another one"
            )
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
        return fetch(local, self.halo.moves, self.grid, self.halo.padding)

    def ready_shape(self, local: Tensor) -> tuple[int, ...]:
        """The shape of what :meth:`prepared` makes."""
        shape = list(local.shape)
        for move in self.halo.moves:
            shape[move.dim] = move.exchange.needed
        for dim, pads in enumerate(pairs(self.halo.padding), 1):
            shape[-dim] += sum(pads)
        return tuple(shape)

    def computed_shape(self, ready: Sequence[int], weight: Tensor) -> tuple[int, ...]:
        """The shape of all outputs of inputs of shape ``ready``, before any are cropped."""
        sizes = (
            _window(kernel, stride, dilation, self.transposed).output_size(size) if size else 0
            for size, kernel, stride, dilation in zip(
                ready[2:], weight.shape[2:], self.stride, self.dilation, strict=True
            )
        )
        channels = weight.shape[1] * self.groups if self.transposed else weight.shape[0]
        return (ready[0], channels, *(max(size, 0) for size in sizes))

    def arguments(self, *, padding: Sequence[int] = ()) -> tuple[Any, ...]:
        """Of PyTorch's convolution, behind its tensors; by default without padding."""
        none = [0] * len(self.stride)
        return self.stride, padding or none, self.dilation, self.transposed, none, self.groups


@dataclass(frozen=True, slots=True)
class _Boxes:
    """In which order a convolution's outputs can be computed while halos are under way.

    First those that need no halo, then, as soon as the halo of an axis is there, the two slabs that
    need it. Lists have an entry for each of the last dimensions.

    Args:
        windows: of the convolution.
        sizes: of the whole input.
        held: inputs that this rank has.
        outputs: that it computes.
        interior: those of them that need no halo.
    """

    windows: tuple[Window, ...]
    sizes: tuple[int, ...]
    held: tuple[Interval, ...]
    outputs: tuple[Interval, ...]
    interior: tuple[Interval, ...]

    @classmethod
    def of(cls, shard: Shard, windows: Sequence[Window]) -> _Boxes:
        sizes = list(local_of(shard).shape[2:])
        held = [Interval(0, size) for size in sizes]
        outputs = [
            Interval(0, window.output_size(size))
            for window, size in zip(windows, sizes, strict=True)
        ]
        for axis, (dim, full) in enumerate(zip(shard.dims, shard.full, strict=True)):
            sizes[dim], held[dim] = full, shard.grid.held(axis, full)
            outputs[dim] = shard.grid.held(axis, windows[dim].output_size(full))
        interior = [
            window.interior(mine, own, size)
            for window, mine, own, size in zip(windows, outputs, held, sizes, strict=True)
        ]
        return cls(tuple(windows), tuple(sizes), tuple(held), tuple(outputs), tuple(interior))

    @property
    def worth_it(self) -> bool:
        """Whether most outputs need no halo, and some do."""
        inside = math.prod(each.size for each in self.interior)
        return math.prod(each.size for each in self.outputs) < 2 * inside and (
            self.interior != self.outputs
        )

    @property
    def padding(self) -> tuple[int, ...] | None:
        """With which a convolution of the shard alone has all outputs in their places.

        Those of the interior are right; the others lack their halo. None: there is none.
        """
        for window, held, outputs in zip(self.windows, self.held, self.outputs, strict=True):
            in_place = outputs.start * window.stride == held.start
            as_many = window.output_size(held.size) == outputs.size
            if not (in_place and as_many and window.before == window.after):
                return None
        return tuple(window.before for window in self.windows)


def _overlapped(
    local: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings, boxes: _Boxes
) -> Tensor:
    """The outputs of a convolution, of which those inside are computed while halos travel."""
    starts = [each.start for each in boxes.held]
    moves, padding = settings.halo.moves, boxes.padding
    fetching = Fetch.start(local, moves[0], settings.grid)
    result: Tensor
    if padding is not None:  # nothing is copied
        result = torch.ops.aten.convolution.default(
            local, weight, bias, *settings.arguments(padding=padding)
        )
    else:
        sizes = [each.size for each in boxes.outputs]
        result = local.new_empty((local.shape[0], weight.shape[0], *sizes))

    def compute(ready: Tensor, box: Sequence[Interval]) -> None:
        place = result
        pads: list[int] = []
        for dim, (window, size, mine) in enumerate(
            zip(boxes.windows, boxes.sizes, box, strict=True)
        ):
            needed = window.needs(mine, size)
            ready = ready.narrow(2 + dim, needed.start - starts[dim], needed.size)
            pads[:0] = window.padding(mine, size)
            place = place.narrow(2 + dim, mine.start - boxes.outputs[dim].start, mine.size)
        ready = F.pad(ready, pads) if any(pads) else ready
        place.copy_(torch.ops.aten.convolution.default(ready, weight, bias, *settings.arguments()))

    box = list(boxes.interior)
    if padding is None:
        compute(local, box)
    for axis, move in enumerate(moves):
        ready = fetching.wait()
        dim = len(box) + move.dim
        starts[dim] = boxes.windows[dim].needs(boxes.outputs[dim], boxes.sizes[dim]).start
        if axis + 1 < len(moves):
            fetching = Fetch.start(ready, moves[axis + 1], settings.grid)
        outputs, interior = boxes.outputs[dim], boxes.interior[dim]
        for slab in (
            Interval(outputs.start, interior.start),
            Interval(interior.stop, outputs.stop),
        ):
            if slab.size:
                compute(ready, [*box[:dim], slab, *box[dim + 1 :]])
        box[dim] = outputs
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: _Settings,
        boxes: _Boxes | None,
    ) -> Tensor:
        ctx.settings, ctx.has_bias = settings, bias is not None
        ctx.save_for_backward(local, weight)
        if boxes is not None:
            return _overlapped(local, weight, bias, settings, boxes)
        ready = settings.prepared(local)
        shape = settings.computed_shape(ready.shape, weight)
        if 0 in shape or 0 in ready.shape:
            outputs = ready.new_zeros(shape)
        else:
            outputs = torch.ops.aten.convolution.default(
                ready, weight, None if settings.crops else bias, *settings.arguments()
            )
        for place, (start, size) in enumerate(settings.crops):
            outputs = _stretch(outputs, 2 + place, start, size)
        if settings.crops and bias is not None:
            outputs = outputs + bias.view(-1, *[1] * len(settings.stride))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Inputs' gradients are computed while their halos are fetched again, weights' while
        gradients of halos travel back.
        """
        local, weight = ctx.saved_tensors
        settings: _Settings = ctx.settings
        of_input, of_weight, of_bias, *_ = ctx.needs_input_grad
        moves, pads = settings.halo.moves, settings.halo.padding
        fetching = Fetch.start(local, moves[0], settings.grid) if of_weight else None
        bias = gradient.sum([0, *range(2, gradient.dim())]) if of_bias else None
        shape = settings.ready_shape(local)
        computed = settings.computed_shape(shape, weight)
        for place, (start, _) in enumerate(settings.crops):
            gradient = _stretch(gradient, 2 + place, -start, computed[2 + place])
        nothing = 0 in computed or 0 in shape
        giving = None
        if of_input:
            into = gradient.new_zeros(shape)
            if not nothing:
                unseen = gradient.new_empty(1).expand(shape)
                into = _backward(gradient, unseen, weight, settings, [True, False, False])[0]
            into = without_padding(into, pads)
        if fetching is not None:
            ready = fetched(fetching, moves[1:], pads)
        if of_input:
            giving = GiveBack.start(into, moves[-1], settings.grid, is_own=True)
        taps = None
        if of_weight:
            taps = torch.zeros_like(weight)
            if not nothing:
                taps = _backward(gradient, ready, weight, settings, [False, True, False])[1]
        result = None
        if giving is not None:
            result = give_back(giving.wait(), moves[:-1], settings.grid, is_own=True)
        return result, taps, bias, None, None


def _backward(
    gradient: Tensor, ready: Tensor, weight: Tensor, settings: _Settings, mask: list[bool]
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = torch.ops.aten.convolution_backward.default(
        gradient, ready, weight, None, *settings.arguments(), mask
    )
    return result


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
    boxes = None if transposed or not grid.overlap else _Boxes.of(shard, windows)
    boxes = boxes if boxes is not None and boxes.worth_it else None
    local, weight, bias = _cast(batched, weight, bias)  # type: ignore[assignment]
    with torch.autocast(batched.device.type, enabled=False):
        result = _Convolution.apply(local, weight, bias, settings, boxes)  # type: ignore[no-untyped-call]
    return alike(result, shard, full=halo.full)


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
        Window(kernel=k, stride=s, before=p, after=p, dilation=d, transposed=True, output_padding=o)
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
