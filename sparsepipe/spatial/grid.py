"""The grid of ranks that share one sample, how a sample is cut over it, and moves between shards.

A move along one axis brings each rank the positions that it needs. The adjoint of a move sends the
gradients of these back to the ranks that hold the positions, where they are added up. Moves along
several axes are made one after another, so that corners need no messages of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.halo import (
    Pending,
    ProcessGroup,
    gather_numbers,
    rank_and_size,
    start_messages,
)
from sparsepipe.spatial.intervals import Exchange, Interval, Piece, exchanges, shares

_MOST_DIMENSIONS = 8
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""Dtypes of shards: ranks tell each other a dtype by its index in this tuple."""


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """Grid of ranks, with an axis for each spatial dimension of a sample.

    Rank r of the group has the coordinates ``numpy.unravel_index(r, shape)``: the last axis varies
    fastest. The spatial dimensions of a tensor are its last ``len(shape)`` ones.

    Args:
        shape: number of shards along each spatial dimension.
        group: process group of the ranks; None: the default one.
        overlap: whether convolutions compute what needs no halo while halos are under way.

    Attributes:
        size: number of ranks.
        dimensions: number of axes of the grid and of spatial dimensions.
        rank: this process's rank in the group.

    Raises:
        ConfigError: the shape does not fit the group, or this process is not in the group.
    """

    shape: tuple[int, ...]
    group: ProcessGroup | None = None
    overlap: bool = True
    size: int = field(init=False)
    dimensions: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(parts) for parts in self.shape))
        object.__setattr__(self, "size", math.prod(self.shape))
        object.__setattr__(self, "dimensions", len(self.shape))
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(
                f"{self.shape} is not a valid shape of a grid: it is empty or has an entry below 1",
                remedy="give a number of shards of at least 1 for each spatial dimension",
            )
        rank, ranks = rank_and_size(self.group)
        if ranks != self.size:
            raise ConfigError(
                f"a grid of {' x '.join(map(str, self.shape))} needs {self.size} ranks, but the "
                f"process group has {ranks}",
                remedy="change the grid, or give a group with as many ranks as the grid has shards",
            )
        object.__setattr__(self, "rank", rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> Grid:
        """Returns the grid itself, since a copied model is on the same ranks."""
        return self

    def coordinate(self, axis: int) -> int:
        """Returns this rank's coordinate along ``axis``."""
        return self.rank // math.prod(self.shape[axis + 1 :]) % self.shape[axis]

    def peer(self, axis: int, coordinate: int) -> int:
        """Returns the rank with this rank's coordinates, except ``coordinate`` along ``axis``."""
        return self.rank + (coordinate - self.coordinate(axis)) * math.prod(self.shape[axis + 1 :])

    def held(self, axis: int, size: int) -> Interval:
        """Returns the interval that this rank holds of ``size`` positions along ``axis``."""
        return shares(size, self.shape[axis])[self.coordinate(axis)]

    def shard(self, full: Tensor) -> Tensor:
        """Returns this rank's shard of a whole tensor [..., *spatial], as a view.

        Raises:
            ConfigError: the tensor has too few dimensions, or one with fewer positions than shards.
        """
        self.check(full.shape[-self.dimensions :])
        return self.part(full)

    def part(self, full: Tensor) -> Tensor:
        """Returns the same as :meth:`shard`, but without checks; the view may be empty."""
        for dim in range(-self.dimensions, 0):
            held = self.held(dim + self.dimensions, full.shape[dim])
            full = full.narrow(dim, held.start, held.size)
        return full

    def check(self, sizes: Sequence[int]) -> None:
        """Checks that the grid can cut samples of these spatial sizes.

        Raises:
            ConfigError: the grid has more or fewer axes, or more shards than positions along one.
        """
        if len(sizes) != self.dimensions:
            raise ConfigError(
                f"the number of spatial dimensions is {len(sizes)} in samples, but "
                f"{self.dimensions} in the grid",
                remedy="give the grid one entry for each spatial dimension of the samples",
            )
        for axis, (size, parts) in enumerate(zip(sizes, self.shape, strict=True)):
            if size < parts:
                raise ConfigError(
                    f"a sample of size {size} in spatial dimension {axis} cannot be cut into "
                    f"{parts} shards",
                    remedy="use a grid with fewer shards in this dimension, or larger samples",
                )

    def gather(self, local: Tensor) -> Tensor:
        """Gathers on every rank the whole tensor that :meth:`shard` has cut.

        In the backward pass, each rank keeps its part of the whole's gradient, so all ranks must
        compute the same loss from the whole. In a rule (:func:`sparsepipe.spatial.rule`), where
        ``local`` is a :class:`~sparsepipe.spatial.Shard`, the ranks' gradients are added up first.
        """
        if has_torch_function_unary(local):
            return handle_torch_function(Grid.gather, (local,), self, local)
        moves = whole_on_all(self, range(-self.dimensions, 0), self.whole_sizes(local))
        return moved(local, moves, self, keeps_part=True)

    def whole_sizes(self, local: Tensor) -> tuple[int, ...]:
        """Returns the spatial sizes of the whole that ``local`` is a shard of; a collective call.

        Raises:
            ConfigError: the ranks do not hold balanced shards of one batch.
        """
        if not self.dimensions <= local.dim() <= _MOST_DIMENSIONS:
            raise ConfigError(
                f"a tensor of shape {list(local.shape)} cannot be a shard on a grid of shape "
                f"{list(self.shape)}",
                remedy=f"give tensors with {self.dimensions} to {_MOST_DIMENSIONS} dimensions",
            )
        dtype = _DTYPES.index(local.dtype) if local.dtype in _DTYPES else -1
        head = [local.dim(), dtype, int(local.requires_grad and torch.is_grad_enabled())]
        entry = [*head, *local.shape, *[0] * (_MOST_DIMENSIONS - local.dim())]
        entries = gather_numbers(entry, self.group, device=local.device, what="comparing shards")
        lead = local.dim() - self.dimensions
        shapes = [each[3 : 3 + each[0]] for each in entries]
        is_balanced = len({(*each[:3], *each[3 : 3 + lead]) for each in entries}) == 1
        whole = []
        for axis, parts in enumerate(self.shape if is_balanced else ()):
            step = math.prod(self.shape[axis + 1 :])
            size = sum(shapes[place * step][lead + axis] for place in range(parts))
            expected = shares(size, parts)
            is_balanced &= all(
                shape[lead + axis] == expected[rank // step % parts].size
                for rank, shape in enumerate(shapes)
            )
            whole.append(size)
        if is_balanced:
            return tuple(whole)
        listed = []
        for rank, (dims, dtype, with_gradient, *shape) in enumerate(entries):
            name = str(_DTYPES[dtype]).removeprefix("torch.") if dtype >= 0 else "another dtype"
            needs = " that requires a gradient" * with_gradient
            listed.append(f"rank {rank}: {name} {shape[:dims]}{needs}")
        raise ConfigError(
            f"ranks do not hold balanced shards of one batch: {'; '.join(listed)}",
            remedy="let every rank read the same batch, and cut it with Grid.shard",
        )


def best_grid(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Returns the shape of the grid of ``ranks`` that exchanges least for samples of ``sizes``.

    What counts is the total area of the cuts, across which neighbours exchange halos. Among grids
    of equal area, the one that cuts the later dimensions is chosen.
    """
    factors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    found = [
        shape
        for shape in itertools.product(factors, repeat=len(sizes))
        if math.prod(shape) == ranks
        and all(parts <= size for parts, size in zip(shape, sizes, strict=True))
    ]
    if not found:
        raise ConfigError(
            f"no grid cuts samples of size {list(sizes)} into {ranks} shards",
            remedy="use another number of devices, or replicas of smaller grids",
        )
    across = math.prod(sizes)
    exchanged = {
        shape: sum((p - 1) * across // size for p, size in zip(shape, sizes, strict=True))
        for shape in found
    }
    return min(found, key=lambda shape: (exchanged[shape], shape))


@dataclass(frozen=True, slots=True)
class Move:
    """This rank's exchange with others along one axis of a grid."""

    dim: int  # of the tensors along that axis, counted from the end (negative)
    axis: int
    exchange: Exchange


def whole_on_all(grid: Grid, dims: Sequence[int], full: Sequence[int]) -> list[Move]:
    """Returns moves that give every rank the whole, whose sizes in ``dims`` are ``full``."""
    found = []
    for axis, (dim, size) in enumerate(zip(dims, full, strict=True)):
        plans = exchanges(size, ((Interval(0, size),),) * grid.shape[axis])
        found.append(Move(dim, axis, plans[grid.coordinate(axis)]))
    return found


@dataclass(slots=True)
class Fetch:
    """A move whose messages are under way."""

    local: Tensor
    move: Move
    grid: Grid
    pending: Pending

    @classmethod
    def start(cls, local: Tensor, move: Move, grid: Grid) -> Fetch:
        held, own, shape = move.exchange.held.start, grid.coordinate(move.axis), list(local.shape)
        sends, receives = [], []
        for piece in move.exchange.sends:
            part = local.narrow(move.dim, piece.interval.start - held, piece.interval.size)
            sends.append((grid.peer(move.axis, piece.rank), part))
        for piece in move.exchange.pieces:
            if piece.rank != own:
                shape[move.dim] = piece.interval.size
                receives.append((grid.peer(move.axis, piece.rank), tuple(shape)))
        pending = start_messages(
            sends, receives, like=local, group=grid.group, what="moving halos between shards"
        )
        return cls(local, move, grid, pending)

    def wait(self) -> Tensor:
        """Waits for the messages; returns a tensor with the positions that this rank needs."""
        received = iter(self.pending.wait())
        held, own = self.move.exchange.held.start, self.grid.coordinate(self.move.axis)
        dim = self.move.dim
        parts = [
            self.local.narrow(dim, piece.interval.start - held, piece.interval.size)
            if piece.rank == own
            else next(received)
            for piece in self.move.exchange.pieces
        ]
        parts = parts or [self.local.narrow(dim, 0, 0)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def halos(self) -> tuple[Tensor, Tensor]:
        """Waits for the messages; returns the halos before and after this rank's shard."""
        received = iter(self.pending.wait())
        before, behind = (
            [part for _, part in zip(pieces, received, strict=False)]
            or [self.local.narrow(self.move.dim, 0, 0)]
            for pieces in halo_pieces(self.move, self.grid)
        )
        return torch.cat(before, self.move.dim), torch.cat(behind, self.move.dim)


@dataclass(slots=True)
class GiveBack:
    """The adjoint of a move, whose gradients are under way to the ranks with their positions."""

    move: Move
    pending: Pending
    like: Tensor

    @classmethod
    def start(
        cls, gradients: Sequence[Tensor], move: Move, grid: Grid, *, like: Tensor
    ) -> GiveBack:
        """Starts sending ``gradients``, one for each of the move's pieces that other ranks hold.

        ``like``: any tensor with their dtype, device and shape except in the move's dimension.
        """
        peer, own = partial(grid.peer, move.axis), grid.coordinate(move.axis)
        theirs = [piece for piece in move.exchange.pieces if piece.rank != own]
        shape, receives = list(like.shape), []
        for piece in move.exchange.sends:
            shape[move.dim] = piece.interval.size
            receives.append((peer(piece.rank), tuple(shape)))
        pending = start_messages(
            [(peer(piece.rank), part) for piece, part in zip(theirs, gradients, strict=True)],
            receives,
            like=like,
            group=grid.group,
            what="moving gradients of halos between shards",
        )
        return cls(move, pending, like)

    def wait(self, kept: Sequence[tuple[Interval, Tensor]], *, is_own: bool = False) -> Tensor:
        """Waits for the messages; returns the gradient of this rank's shard.

        ``kept``: positions in the shard, each with the gradient that this rank has itself computed;
        with ``is_own``, these tensors may be changed in place.
        """
        held, dim = self.move.exchange.held, self.move.dim
        if len(kept) == 1 and kept[0][0] == held:
            (_, total), *kept = kept
            total = total if is_own else total.clone()
        else:
            shape = list(self.like.shape)
            shape[dim] = held.size
            total = self.like.new_zeros(shape)
        received = zip(self.move.exchange.sends, self.pending.wait(), strict=True)
        for interval, part in [*kept, *((piece.interval, part) for piece, part in received)]:
            if not interval.size:
                continue  # an empty interval may lie outside this rank's shard
            total.narrow(dim, interval.start - held.start, interval.size).add_(part)
        return total


def halo_pieces(move: Move, grid: Grid) -> tuple[list[Piece], list[Piece]]:
    """Returns the pieces of this rank's halos, which others hold, before and after its shard."""
    own, end = grid.coordinate(move.axis), move.exchange.held.stop
    theirs = [piece for piece in move.exchange.pieces if piece.rank != own]
    return (
        [piece for piece in theirs if piece.interval.start < end],
        [piece for piece in theirs if piece.interval.start >= end],
    )


def fetch(local: Tensor, moves: Sequence[Move], grid: Grid) -> Tensor:
    """Makes ``moves`` in turn, without autograd; returns the positions that this rank needs."""
    fetching = Fetch.start(local, moves[0], grid)
    for move in moves[1:]:
        fetching = Fetch.start(fetching.wait(), move, grid)
    return fetching.wait()


def give_back(
    gradient: Tensor, moves: Sequence[Move], grid: Grid, *, is_own: bool = False
) -> Tensor:
    """Sends gradients of :func:`fetch`'s result back; ``is_own``: may overwrite ``gradient``."""
    for move in reversed(moves):
        own, pieces = grid.coordinate(move.axis), move.exchange.pieces
        sizes = [piece.interval.size for piece in pieces]
        parts = list(zip(pieces, torch.split(gradient, sizes, move.dim), strict=True))
        theirs = [part for piece, part in parts if piece.rank != own]
        giving = GiveBack.start(theirs, move, grid, like=gradient)
        kept = [(piece.interval, part) for piece, part in parts if piece.rank == own]
        gradient = giving.wait(kept, is_own=is_own)
        is_own = True
    return gradient


class _Moved(torch.autograd.Function):
    """Makes a move; with ``keeps_part``, the gradient of ``local`` is a part of the result's."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, move: Move, keeps_part: bool) -> Tensor:
        ctx.grid, ctx.move, ctx.keeps_part = grid, move, keeps_part
        # Activation checkpointing recomputes when a saved tensor is first needed. A layer with an
        # empty output saves none: with this one, messages go in the same order on every rank.
        ctx.save_for_backward(local.new_empty(0))
        found = Fetch.start(local, move, grid).wait()
        # The result must not be a view of ``local``.
        shared = found.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return found.clone() if shared else found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        held = ctx.move.exchange.held
        if ctx.keeps_part:
            return gradient.narrow(ctx.move.dim, held.start, held.size), None, None, None
        return give_back(gradient, [ctx.move], ctx.grid), None, None, None


def moved(local: Tensor, moves: Sequence[Move], grid: Grid, *, keeps_part: bool = False) -> Tensor:
    """Makes ``moves`` in turn, with autograd; returns the positions that this rank needs.

    A rank that needs only what it holds gets a view. ``keeps_part``: for :func:`whole_on_all` if
    all ranks get the same gradient of the whole: each keeps its part of it.
    """
    for move in moves:
        if move.exchange.is_nothing and not keeps_part:
            continue  # a view's backward pass would fill a tensor as large as its base
        if move.exchange.is_alone and not keeps_part:
            local = Fetch.start(local, move, grid).wait()
        else:
            local = _Moved.apply(local, grid, move, keeps_part)  # type: ignore[no-untyped-call]
    return local
