"""Exchange of codes (outputs of encoders) and their gradients between ranks with domains.

The mean of a shared parameter's gradients over the ranks that have it is the gradient that a single
process would compute; so is the mean of a private parameter's gradients over a domain's replicas.

Shapes: B samples, C values of a code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepipe.domains.placement import Placement
from sparsepipe.models.domain_separation import (
    Codes,
    DomainExchange,
    DomainSeparation,
    MinibatchLosses,
)
from sparsepipe.runtime.collectives.halo import (
    ProcessGroup,
    add_up,
    added_up,
    gather_numbers,
    start_messages,
)

_CODES, _LABELS = "sending codes to other ranks", "sending labels to other ranks"
_GRADIENTS = "sending gradients of codes back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the ranks of ``placement``; with grids, a group has one process of each.

    Args:
        placement: which rank has which domains.
        rank: index of this process, or of its grid, in ``placement``.
        group: process group of all ranks; None: the default one.
        encoders: process group of the ranks that have domains; None: no others have any.
        replicas: process group of the ranks that have this rank's domain; None: no others have it.
        whole: function that returns whole samples, given this process's part, cut over a grid.
    """

    placement: Placement
    rank: int
    group: ProcessGroup | None = None
    encoders: ProcessGroup | None = None
    replicas: ProcessGroup | None = None
    whole: Callable[[Tensor], Tensor] = lambda value: value

    def sizes(self, own: Mapping[str, int], *, device: torch.device) -> list[tuple[int, ...]]:
        """Gathers each rank's number of samples of each domain; ``own``: this rank's, by name."""
        numbers = [own.get(name, 0) for name in self.placement.domains]
        what = "comparing numbers of samples"
        return gather_numbers(numbers, self.group, device=device, what=what)

    def by_domain(self, sizes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Returns the total number of samples of each domain, given the result of ``sizes()``."""
        totals = map(sum, zip(*sizes, strict=True))
        return dict(zip(self.placement.domains, totals, strict=True))

    def private_scaled(self, codes: Codes, ranks: int) -> Codes:
        """Scales gradients of private codes by (number of this domain's replicas) / ``ranks``."""
        _, replicas = self.placement.replica(self.rank)
        return replace(codes, private_BC=_scaled(codes.private_BC, replicas / ranks))


@dataclass(frozen=True, slots=True)
class OneGrid(DomainExchange):
    """Exchange for domains that are all on a single grid, whose ranks compute the same losses."""

    ranks: Ranks

    def whole(self, value: Tensor) -> Tensor:
        return self.ranks.whole(value)


@dataclass(frozen=True, slots=True)
class _OverGrids(OneGrid):
    """Exchange for domains that are spread over several ranks, or grids of ranks."""

    def total(self, counts: Tensor) -> Tensor:
        """Returns the sum of all ranks' ``counts``; replicas count different samples."""
        return add_up(counts, self.ranks.group, what="adding up what ranks have counted")

    def add_up(self, value: Tensor, domain: str | None) -> Tensor:
        """Returns a batch norm's ``value`` summed over the ranks with ``domain`` (None: with any).

        In the backward pass, the ranks' gradients are summed as well.
        """
        placement, group = self.ranks.placement, self.ranks.replicas
        count = placement.encoders if domain is None else len(placement.ranks_of(domain))
        if domain is None:
            group = self.ranks.encoders
        return value if count == 1 else added_up(value, group, what="the statistics of a norm")


@dataclass(frozen=True, slots=True)
class SharedLosses(_OverGrids):
    """Exchange in which every rank decodes its own codes and computes the losses of all codes."""

    def losses(self, module: DomainSeparation, batch: Mapping[str, Any]) -> MinibatchLosses:
        """Computes the losses of all ranks' samples; ``batch`` has those of this rank."""
        ranks = self.ranks
        codes = ranks.private_scaled(module.encoded(batch), ranks.placement.ranks)
        rows = module.decoded(codes)
        sizes = ranks.sizes(codes.sizes, device=rows.error_B.device)
        counts = [sum(each) for each in sizes]
        packed = torch.cat([rows.shared_BC, rows.private_BC, rows.error_B[:, None]], 1)
        # Every rank computes the losses of all samples, but backpropagates only to its own rows:
        # scaled by the number of ranks, their gradients have the right mean over the ranks.
        gathered = _from_all(_scaled(packed, len(counts)), counts, ranks, what=_CODES)
        code = rows.shared_BC.shape[1]
        shared, private, error = gathered.split_with_sizes([code, code, 1], 1)
        source = [each[0] for each in sizes]
        label_B = _from_all(rows.label_B[: source[ranks.rank]], source, ranks, what=_LABELS)
        gathered_rows = replace(
            rows,
            shared_BC=shared,
            private_BC=private,
            error_B=error.squeeze(1),
            label_B=label_B,
            sizes=ranks.by_domain(sizes),
        )
        return module.losses(gathered_rows)


@dataclass(frozen=True, slots=True)
class OneLossRank(_OverGrids):
    """Exchange in which the last rank gets all codes, computes all losses and sends gradients back.

    Source: Tsaris and Hinkle's Multi-DSN, in which a separate rank has classifier, decoder and
    losses.
    """

    def losses(self, module: DomainSeparation, batch: Mapping[str, Any]) -> MinibatchLosses:
        """Returns the losses of all ranks' samples, which the last rank computes and sends."""
        ranks, device = self.ranks, module.device
        if ranks.rank == ranks.placement.loss_rank:
            sizes = ranks.sizes({}, device=device)
            found = module.losses(module.decoded(self._received(module, sizes)))
            said = [found.objective.detach(), *found.parts.values()]
            packed = torch.stack([each.double() for each in said])
            for rank in range(ranks.placement.encoders):
                _send(packed, rank, ranks)
            return found
        codes = ranks.private_scaled(module.encoded(batch), ranks.placement.encoders)
        sizes, last = ranks.sizes(codes.sizes, device=device), ranks.placement.ranks - 1
        packed = torch.cat([codes.shared_BC, codes.private_BC], 1)
        target = codes.target.to(packed.dtype)
        _send(target, last, ranks)
        if count := sizes[ranks.rank][0]:
            _send(codes.label_B[:count], last, ranks)
        objective: Tensor = _Send.apply(packed, ranks)  # type: ignore[no-untyped-call]
        names = module.part_names
        values = _receive((1 + len(names),), last, objective.double(), ranks)
        objective = objective + values[0].to(objective.dtype)
        parts = dict(zip(names, values[1:], strict=True))
        return MinibatchLosses(objective=objective, parts=parts, samples=sum(map(sum, sizes)))

    def _received(self, module: DomainSeparation, sizes: Sequence[Sequence[int]]) -> Codes:
        ranks, network = self.ranks, module.network
        like = next(network.decoder.parameters())
        codes, targets, labels = [], [], []
        for rank, counts in enumerate(sizes[:-1]):
            count = sum(counts)
            shape = (count, *network.decoded_shape)
            targets.append(_receive(shape, rank, like, ranks))
            if counts[0]:
                empty = torch.empty(0, dtype=torch.int64, device=like.device)
                labels.append(_receive((counts[0],), rank, empty, ranks))
            codes.append(_receive((count, 2 * network.code), rank, like, ranks))
        joined = torch.cat(codes).requires_grad_()
        counts = [sum(each) for each in sizes[:-1]]

        def send_back(gradient: Tensor) -> None:
            for rank, part in enumerate(gradient.split_with_sizes(counts)):
                _send(part, rank, ranks, what=_GRADIENTS)

        joined.register_hook(send_back)  # type: ignore[no-untyped-call]
        shared, private = joined.chunk(2, 1)
        return Codes(
            shared_BC=shared,
            private_BC=private,
            target=torch.cat(targets),
            label_B=torch.cat(labels),
            sizes=ranks.by_domain(sizes),
        )


def _scaled(value: Tensor, factor: float) -> Tensor:
    """Returns ``value`` as it is, but multiplies its gradient by ``factor``."""
    if factor == 1 or not value.requires_grad:
        return value
    scaled = value.view_as(value)
    scaled.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return scaled


def _from_all(rows: Tensor, counts: Sequence[int], ranks: Ranks, *, what: str) -> Tensor:
    """Gathers all ranks' rows, ``counts[rank]`` of each; only this rank's get gradients."""
    others = [rank for rank in range(len(counts)) if rank != ranks.rank]
    pending = start_messages(
        [(rank, rows.detach()) for rank in others],
        [(rank, (counts[rank], *rows.shape[1:])) for rank in others],
        like=rows.detach(),
        group=ranks.group,
        what=what,
    )
    parts = iter(pending.wait())
    return torch.cat([rows if rank == ranks.rank else next(parts) for rank in range(len(counts))])


def _send(value: Tensor, rank: int, ranks: Ranks, *, what: str = _CODES) -> None:
    message = [(rank, value.detach())]
    start_messages(message, [], like=value, group=ranks.group, what=what).wait()


def _receive(
    shape: tuple[int, ...], rank: int, like: Tensor, ranks: Ranks, *, what: str = _CODES
) -> Tensor:
    expected = [(rank, shape)]
    (found,) = start_messages([], expected, like=like.detach(), group=ranks.group, what=what).wait()
    return found


class _Send(torch.autograd.Function):
    """Sends codes to the last rank and returns 0; its backward pass receives their gradients."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        ctx.shape = tuple(packed.shape)
        _send(packed, ranks.placement.ranks - 1, ranks)
        return packed.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks: Ranks = ctx.ranks
        last = ranks.placement.ranks - 1
        found = _receive(ctx.shape, last, gradient, ranks, what=_GRADIENTS)
        return found * ranks.placement.encoders, None
