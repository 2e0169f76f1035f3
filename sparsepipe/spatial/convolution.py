"""Convolutions of shards: halos are moved in the forward pass and again in the backward pass.

For the backward pass, layers save a shard without its halo and padding: otherwise the ranks
together would save more than one process does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepipe.errors import ConfigError
from sparsepipe.spatial.grid import Fetch, GiveBack, Grid, Move, give_back, halo_pieces
from sparsepipe.spatial.intervals import Interval, Window, window_exchanges
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    function_rule,
    local_of,
    whole_shape,
    without_rule,
)


def halo_moves(shard: Shard, windows: Sequence[Window]) -> tuple[Move, ...]:
    """Returns, for each axis, the exchange that brings this rank the halos of ``windows``."""
    grid, count = shard.grid, len(windows)
    sizes = whole_shape(shard)[-count:]
    if any(window.output_size(size) < 1 for window, size in zip(windows, sizes, strict=True)):
        kernels = " x ".join(str(window.reach) for window in windows)
        raise ConfigError(
            f"a layer's window of {kernels} positions does not fit into a sample of "
            f"{' x '.join(map(str, sizes))}",
            remedy="give larger samples, or a model with fewer or smaller windows",
        )
    if any(-dim > count for dim in shard.dims):
        raise without_rule(
            f"a layer for {count}D samples",
            why=": the sample is cut along another dimension",
        )
    return tuple(
        Move(dim, axis, window_exchanges(windows[dim], size, parts)[grid.coordinate(axis)])
        for axis, (dim, size, parts) in enumerate(
            zip(shard.dims, shard.full, grid.shape, strict=True)
        )
    )


def as_tuple(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Repeats a number, or a sequence's only number, ``count`` times; keeps a longer sequence."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class _Layer:
    """A convolution of shards. Tuples except ``moves`` have an entry for each spatial dimension."""

    grid: Grid
    windows: tuple[Window, ...]
    groups: int
    moves: tuple[Move, ...]  # exchanges that bring halos, without those that change nothing
    held: tuple[Interval, ...]  # positions of the inputs that this rank holds
    needed: tuple[Interval, ...]  # positions of the inputs that this rank has after the moves
    outputs: tuple[Interval, ...]  # positions of the outputs that this rank computes
    inside: tuple[Interval, ...]  # positions of the inputs that this rank both holds and needs

    @classmethod
    def of(cls, shard: Shard, windows: Sequence[Window], groups: int) -> _Layer:
        moves, grid = halo_moves(shard, windows), shard.grid
        sizes = whole_shape(shard)[-len(windows) :]
        held = [Interval(0, size) for size in sizes]
        outputs = [
            Interval(0, window.output_size(size))
            for window, size in zip(windows, sizes, strict=True)
        ]
        for axis, dim in enumerate(shard.dims):
            held[dim] = grid.held(axis, sizes[dim])
            outputs[dim] = grid.held(axis, outputs[dim].size)
        moves = tuple(move for move in moves if not move.exchange.is_nothing)
        needed = list(held)
        for dim in (move.dim for move in moves):
            needed[dim] = windows[dim].needs(outputs[dim], sizes[dim])
        inside = tuple(mine & wanted for mine, wanted in zip(held, needed, strict=True))
        intervals = tuple(held), tuple(needed), tuple(outputs), inside
        return cls(grid, tuple(windows), groups, moves, *intervals)

    def halos(self, place: int) -> list[_Part]:
        """Returns a :class:`_Part` for each of the halos (before, after) of ``moves[place]``."""
        dim = self.moves[place].dim
        later = [move.dim for move in self.moves[place + 1 :]]
        found = []
        for halo in self.needed[dim].without(self.held[dim]):
            inputs, outputs = list(self.needed), list(self.outputs)
            inputs[dim] = halo
            for each in later:
                inputs[each] = self.inside[each]
            outputs[dim] = self.windows[dim].reached(halo) & self.outputs[dim]
            found.append(_Part(self, tuple(inputs), tuple(outputs)))
        return found

    def arriving(self, fetching: Fetch | None) -> Iterator[tuple[_Part, Tensor]]:
        """Yields, for each halo as soon as it arrives, its :class:`_Part` and the inputs in it."""
        for place in range(len(self.moves)):
            assert fetching is not None
            halos = fetching.halos()
            if place + 1 < len(self.moves):
                fetching = Fetch.start(fetching.wait(), self.moves[place + 1], self.grid)
            for part, halo in zip(self.halos(place), halos, strict=True):
                yield part, self.narrowed(halo, self.moves[place + 1 :])

    def start(self, local: Tensor) -> Fetch | None:
        """Starts the first of this rank's exchanges, :attr:`moves`; returns None if it has none."""
        fetching = Fetch.start(local, self.moves[0], self.grid) if self.moves else None
        if fetching is not None and not self.grid.overlap:
            fetching.pending.wait()
        return fetching

    def narrowed(self, value: Tensor, moves: Sequence[Move] | None = None) -> Tensor:
        """Narrows ``value`` to :attr:`inside` in the dimensions of ``moves``; None: in all."""
        for move in self.moves if moves is None else moves:
            inside = self.inside[move.dim]
            first = inside.start - self.held[move.dim].start if inside.size else 0
            value = value.narrow(move.dim, first, inside.size)
        return value

    def arguments(self, padding: Sequence[int]) -> tuple[Any, ...]:
        """Returns the arguments of ``aten.convolution`` that follow input, weight and bias."""
        return (
            [window.stride for window in self.windows],
            padding,
            [window.dilation for window in self.windows],
            self.windows[0].transposed,
            [0] * len(self.windows),
            self.groups,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a convolution's outputs that some of its inputs make; a rank adds up the parts."""

    layer: _Layer
    inputs: tuple[Interval, ...]  # positions of the inputs, for each spatial dimension
    outputs: tuple[Interval, ...]  # contain all outputs of this rank that these contribute to

    @property
    def is_empty(self) -> bool:
        return not all(each.size for each in (*self.inputs, *self.outputs))

    @property
    def padding(self) -> tuple[list[int], list[int]]:
        """Padding by PyTorch's convolution, and by ``F.pad``; one of the two does all of it.

        ``F.pad`` pads inputs of a convolution, outputs of a transposed one; negative padding crops.
        """
        even, pads = list[int](), list[int]()
        is_even, windows = True, self.layer.windows
        for window, inputs, outputs in zip(windows, self.inputs, self.outputs, strict=True):
            near, far = (inputs, outputs) if window.transposed else (outputs, inputs)
            start = near.start * window.stride - window.before
            stop = (near.stop - 1) * window.stride - window.before + window.reach
            sign = 1 if window.transposed else -1
            pads[:0] = sign * (start - far.start), sign * (far.stop - stop)
            both = -sign * pads[0]
            same = replace(window, before=both, after=both, output_padding=0)
            is_even &= both >= 0 and same.output_size(inputs.size) == outputs.size
            even.append(both)
        return (even, []) if is_even else ([0] * len(even), pads)

    def compute(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes what ``inputs`` contribute to the outputs, and adds ``bias``."""
        transposed = self.layer.windows[0].transposed
        padding, pads = ([], []) if self.is_empty else self.padding
        # Where outputs are cropped, the bias is added afterwards.
        is_behind = self.is_empty or bool(pads and transposed)
        if self.is_empty:
            channels = weight.shape[1] * self.layer.groups if transposed else weight.shape[0]
            sizes = [each.size for each in self.outputs]
            outputs = inputs.new_zeros((inputs.shape[0], channels, *sizes))
        else:
            inputs = F.pad(inputs, pads) if pads and not transposed else inputs
            outputs = torch.ops.aten.convolution.default(
                inputs, weight, None if is_behind else bias, *self.layer.arguments(padding)
            )
            outputs = F.pad(outputs, pads) if is_behind else outputs
        if bias is None or not is_behind:
            return outputs
        return outputs.add_(bias.view(-1, *[1] * len(self.outputs)))

    def gradients(
        self, gradient: Tensor, inputs: Tensor | None, weight: Tensor, mask: Sequence[bool]
    ) -> tuple[Any, ...]:
        """Returns the gradients of inputs, weight and bias, with None where ``mask`` is False.

        ``gradient``: that of the outputs. ``inputs`` are needed only for the weight's gradient.
        """
        transposed, sizes = self.layer.windows[0].transposed, [each.size for each in self.inputs]
        if inputs is None:  # its values do not matter
            channels = weight.shape[0] if transposed else weight.shape[1] * self.layer.groups
            inputs = gradient.new_empty(1).expand(gradient.shape[0], channels, *sizes)
        padding, pads = ([], []) if self.is_empty else self.padding
        # Where outputs are cropped, the bias is added afterwards.
        is_behind = self.is_empty or bool(pads and transposed)
        bias = gradient.sum([0, *range(2, gradient.dim())]) if mask[2] and is_behind else None
        if self.is_empty:
            return (
                inputs.new_zeros(inputs.shape) if mask[0] else None,
                torch.zeros_like(weight) if mask[1] else None,
                bias,
            )
        back = [-each for each in pads]
        if pads and transposed:
            gradient = F.pad(gradient, back)
        elif pads:
            inputs = F.pad(inputs, pads)
        of_inputs, of_weight, of_bias = torch.ops.aten.convolution_backward.default(
            gradient,
            inputs,
            weight,
            [weight.shape[1] * self.layer.groups if transposed else weight.shape[0]],
            *self.layer.arguments(padding),
            [mask[0], mask[1], mask[2] and not is_behind],
        )
        if mask[0] and pads and not transposed:
            of_inputs = F.pad(of_inputs, back)
        return of_inputs, of_weight, bias if is_behind else of_bias

    def of(self, outputs: Tensor) -> Tensor:
        """Narrows ``outputs``, a tensor with all outputs of this rank, to those of this part."""
        for dim, (mine, own) in enumerate(zip(self.outputs, self.layer.outputs, strict=True)):
            outputs = outputs.narrow(2 + dim, mine.start - own.start, mine.size)
        return outputs


class _ShardConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(local, weight)
        fetching = layer.start(local)
        own = _Part(layer, layer.inside, layer.outputs)
        result = own.compute(layer.narrowed(local), weight, bias)
        for part, halo in layer.arriving(fetching):
            if not part.is_empty:
                part.of(result).add_(part.compute(halo, weight, None))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Computes most gradients while halos, and gradients of halos, travel between ranks."""
        local, weight = ctx.saved_tensors
        layer: _Layer = ctx.layer
        moves, mask = layer.moves, ctx.needs_input_grad[:3]
        fetching = layer.start(local) if mask[1] else None
        giving: GiveBack | None = None
        halos: list[list[Tensor]] = []  # for each move, last one first: before and after
        for place in reversed(range(len(moves) if mask[0] else 0)):
            found = [
                part.gradients(part.of(gradient), None, weight, [True, False, False])[0]
                for part in layer.halos(place)
            ]
            halos.append(found)
            if giving is None:  # send along the last axis while others are computed
                giving = _start_giving_halos(found, moves[place], layer.grid)
        own = _Part(layer, layer.inside, layer.outputs)
        into, of_weight, of_bias = own.gradients(gradient, layer.narrowed(local), weight, mask)
        if mask[1]:
            for part, halo in layer.arriving(fetching):
                if not part.is_empty:
                    needs = [False, True, False]
                    of_weight += part.gradients(part.of(gradient), halo, weight, needs)[1]
        if giving is not None:
            for (before, behind), move in zip(reversed(halos[1:]), moves[:-1], strict=True):
                if before.shape[move.dim] or behind.shape[move.dim]:
                    into = torch.cat([before, into, behind], move.dim)
            into = giving.wait([(layer.inside[moves[-1].dim], into)], is_own=True)
            into = give_back(into, moves[:-1], layer.grid, is_own=True)
        return into if mask[0] else None, of_weight, of_bias, None


def _start_giving_halos(halos: Sequence[Tensor], move: Move, grid: Grid) -> GiveBack:
    """Starts sending the gradients of the two halos to the ranks that hold their positions."""
    parts: list[Tensor] = []
    for halo, pieces in zip(halos, halo_pieces(move, grid), strict=True):
        parts += torch.split(halo, [piece.interval.size for piece in pieces], move.dim)
    giving = GiveBack.start(parts, move, grid, like=halos[0])
    if not grid.overlap:
        giving.pending.wait()
    return giving


def _run_convolution(
    shard: Shard, weight: Tensor, bias: Tensor | None, windows: Sequence[Window], groups: int
) -> Shard:
    batched = local_of(shard)
    if batched.dim() != weight.dim():
        raise without_rule("a convolution of a sample without a batch dimension")
    layer = _Layer.of(shard, windows, groups)
    full = [
        window.output_size(size)
        for window, size in zip(windows, whole_shape(shard)[2:], strict=True)
    ]
    kind, tensors = batched.device.type, (batched, weight, bias)
    if torch.is_autocast_enabled(kind):  # casts floating-point dtypes except float64, as PyTorch
        dtype = torch.get_autocast_dtype(kind)
        tensors = tuple(  # type: ignore[assignment]
            each.to(dtype)
            if each is not None and each.is_floating_point() and each.dtype != torch.float64
            else each
            for each in tensors
        )
    with torch.autocast(kind, enabled=False):
        result = _ShardConvolution.apply(*tensors, layer)  # type: ignore[no-untyped-call]
    return alike(result, shard, full=[full[dim] for dim in shard.dims])


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
    dilations = as_tuple(dilation, count)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = [(each // 2, each - each // 2) for each in reach]
    else:
        pads = [
            (each, each) for each in as_tuple(0 if isinstance(padding, str) else padding, count)
        ]
    windows = [
        Window(kernel=k, stride=s, before=p[0], after=p[1], dilation=d)
        for k, s, p, d in zip(
            weight.shape[2:], as_tuple(stride, count), pads, dilations, strict=True
        )
    ]
    return _run_convolution(input, weight, bias, windows, groups)


@function_rule(
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
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
    given = (as_tuple(n, weight.dim() - 2) for n in (stride, padding, dilation, output_padding))
    windows = [
        Window(kernel=k, stride=s, before=p, after=p, dilation=d, transposed=True, output_padding=o)
        for k, s, p, d, o in zip(weight.shape[2:], *given, strict=True)
    ]
    return _run_convolution(input, weight, bias, windows, groups)
