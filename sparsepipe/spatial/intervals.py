"""Which inputs a shard's outputs need, and which rank holds them: pure arithmetic on intervals.

Along one axis, an array of n positions is cut into P shards as equal as possible: rank r holds
``range(r * n // P, (r + 1) * n // P)``. Layers keep to that: a layer with m output positions leaves
``range(r * m // P, (r + 1) * m // P)`` on rank r, whatever its windows are. Shards made by
different layers are therefore aligned and can be added. Shards may differ in size by one, be
smaller than the halo that a window needs beyond them, or be empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Interval:
    """Positions from ``start`` up to, but not including, ``stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(self.stop - self.start, 0)

    def __and__(self, other: Interval) -> Interval:
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def without(self, other: Interval) -> tuple[Interval, Interval]:
        """Returns the parts of this interval before ``other`` and after it."""
        return (
            Interval(self.start, max(self.start, min(self.stop, other.start))),
            Interval(min(self.stop, max(self.start, other.stop)), self.stop),
        )


EMPTY = Interval(0, 0)


@lru_cache(maxsize=4096)
def shares(size: int, parts: int) -> tuple[Interval, ...]:
    """Returns the intervals into which ``size`` positions are cut for ``parts`` balanced shards."""
    return tuple(Interval(r * size // parts, (r + 1) * size // parts) for r in range(parts))


@dataclass(frozen=True, slots=True)
class Window:
    """Dependence of a layer's outputs on its inputs along one axis.

    Output o of a window that is not transposed sees inputs ``o * stride - before + t * dilation``
    for t in 0 .. kernel - 1; input i of a transposed one contributes to outputs
    ``i * stride - before + t * dilation``.

    Args:
        kernel: number of taps, that is, of inputs in a window.
        stride: distance between neighbouring windows.
        before: number of positions of padding before the first input; a negative number crops.
        after: the same after the last input.
        dilation: distance between neighbouring taps.
        transposed: whether the window is that of a transposed convolution.
        output_padding: number of positions that a transposed convolution adds at its output's end.
        ceil_mode: whether a pool keeps a last window that reaches beyond input and padding.
    """

    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    transposed: bool = False
    output_padding: int = 0
    ceil_mode: bool = False

    @property
    def reach(self) -> int:
        """Number of positions from the first tap to the last, both counted."""
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int) -> int:
        """Returns the number of outputs for ``size`` inputs, as PyTorch counts them."""
        if self.transposed:
            return (
                (size - 1) * self.stride
                - self.before
                - self.after
                + self.reach
                + self.output_padding
            )
        room = size + self.before + self.after - self.reach
        if not self.ceil_mode:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        # The last window must begin in the input or in the padding before it.
        return count - 1 if (count - 1) * self.stride >= size + self.before else count

    def needs(self, outputs: Interval, size: int) -> Interval:
        """Returns the interval, within ``size`` inputs, that ``outputs`` depend on."""
        if not outputs.size:
            return EMPTY
        found = self._spread(outputs) if not self.transposed else self._gathered(outputs)
        return found & Interval(0, size)

    def reached(self, inputs: Interval) -> Interval:
        """Returns the outputs that ``inputs`` contribute to, as if outputs had no first or last."""
        if not inputs.size:
            return EMPTY
        return self._spread(inputs) if self.transposed else self._gathered(inputs)

    def _spread(self, from_: Interval) -> Interval:
        start = from_.start * self.stride - self.before
        return Interval(start, (from_.stop - 1) * self.stride - self.before + self.reach)

    def _gathered(self, from_: Interval) -> Interval:
        start = -(-(from_.start + self.before - self.reach + 1) // self.stride)
        return Interval(start, max(start, (from_.stop - 1 + self.before) // self.stride + 1))

    def padding(self, outputs: Interval, size: int) -> tuple[int, int]:
        """Returns how many positions of padding ``outputs`` see before and after their inputs.

        The window must not be transposed.
        """
        if not outputs.size:
            return 0, 0
        start = outputs.start * self.stride - self.before
        stop = (outputs.stop - 1) * self.stride - self.before + self.reach
        needed = self.needs(outputs, size)
        if not needed.size:
            return stop - start, 0
        return needed.start - start, stop - needed.stop


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions that one rank along an axis gets from another, or from itself.

    Args:
        rank: coordinate, along the axis, of the rank at the other end.
        interval: positions, counted in the whole.
    """

    rank: int
    interval: Interval


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank along an axis sends and receives, so that each rank has what it needs.

    Args:
        held: positions of the rank's shard.
        pieces: what the rank needs, in order, each from the rank that holds it, itself included.
        sends: pieces of the rank's shard for others, in the order in which each receives them.
    """

    held: Interval
    pieces: tuple[Piece, ...]
    sends: tuple[Piece, ...]

    @property
    def is_alone(self) -> bool:
        """Whether the rank neither sends nor receives anything."""
        own = all(piece.interval & self.held == piece.interval for piece in self.pieces)
        return own and not self.sends

    @property
    def is_nothing(self) -> bool:
        """Whether the exchange leaves the shard as it is."""
        return self.is_alone and [piece.interval for piece in self.pieces] == [self.held]

    @property
    def sent(self) -> int:
        """Number of positions that the rank sends to others, counted once for each of these."""
        return sum(piece.interval.size for piece in self.sends)


@lru_cache(maxsize=4096)
def exchanges(size: int, needs: tuple[tuple[Interval, ...], ...]) -> tuple[Exchange, ...]:
    """Returns what each rank along an axis of balanced shards sends and receives.

    Args:
        size: number of positions of the whole.
        needs: for each rank, the intervals that it needs, in the order in which it concatenates
            them; they may overlap.
    """
    held = shares(size, len(needs))
    pieces = [
        [
            Piece(rank, interval & theirs)
            for interval in intervals
            for rank, theirs in enumerate(held)
            if (interval & theirs).size
        ]
        for intervals in needs
    ]
    return tuple(
        Exchange(
            own,
            tuple(pieces[rank]),
            tuple(
                Piece(other, piece.interval)
                for other, theirs in enumerate(pieces)
                if other != rank
                for piece in theirs
                if piece.rank == rank
            ),
        )
        for rank, own in enumerate(held)
    )


@lru_cache(maxsize=4096)
def window_exchanges(window: Window, size: int, parts: int) -> tuple[Exchange, ...]:
    """Returns each rank's exchange before a layer with ``window`` on ``parts`` shards."""
    outputs = shares(window.output_size(size), parts)
    return exchanges(size, tuple((window.needs(each, size),) for each in outputs))


def sent_bytes(
    windows: Sequence[Window], sizes: Sequence[int], parts: Sequence[int], *, position_bytes: int
) -> tuple[int, ...]:
    """Returns the bytes that each rank of a grid sends for the halos of one layer.

    Moves along the axes follow each other, so a message along one carries halos of the axes before
    it. A convolution or a pool moves halos in the forward pass and again in the backward pass, and
    sends as many bytes of their gradients back: in both passes together, all ranks send three times
    the sum of these numbers, or two times if the layer's input needs no gradient.

    Args:
        windows: windows of the layer, one for each axis of the grid.
        sizes: number of positions of the whole along each axis.
        parts: number of shards along each axis.
        position_bytes: bytes of one position of the grid: samples times channels times positions
            of uncut dimensions times bytes of an element.

    Returns:
        Bytes by rank; the last axis of the grid varies fastest.
    """
    plans = map(window_exchanges, windows, sizes, parts)
    found = []
    for own in itertools.product(*plans):
        positions = 0
        for axis, exchange in enumerate(own):
            before = [sum(piece.interval.size for piece in each.pieces) for each in own[:axis]]
            behind = [each.held.size for each in own[axis + 1 :]]
            positions += math.prod(before) * exchange.sent * math.prod(behind)
        found.append(positions * position_bytes)
    return tuple(found)
