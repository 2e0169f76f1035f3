"""Collectives of the replicas of a stage: gradients once per round, statistics at drains.

The module needs no wrapper: the schedule sets rounds, in which one sum carries all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.ordered_sum import OrderedSum
from sparsepipe.runtime.failures.missing_ranks import collective

Gradients = Mapping[str, Tensor | None]


class Replicas:
    """The replicas of a stage. Collectives raise a TransportError if one is gone or takes no part.

    Gradients are added in the order of the replicas: every replica goes on with the same bits as
    one process that averages the same gradients. In a round, each replica has one minibatch.

    Args:
        group: group of the replicas; None: the stage has one rank; gradients stay as they are.
        parameters: parameters of the stage by name, in the same order on all replicas.
        grid: whether these are the ranks of a grid, each of which has an addend of every gradient,
            and the statistics of whole samples.

    Attributes:
        count: number of replicas; 1 in a grid.
        first: number that errors give to the first minibatch since the last drain or, in a
            synchronous pipeline, to the one in progress.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        parameters: Mapping[str, nn.Parameter],
        *,
        grid: bool = False,
    ) -> None:
        self._group = group
        self._grid = grid
        self._over_gloo = group is not None and dist.get_backend(group) == "gloo"
        self.count = 1 if group is None or grid else dist.get_world_size(group)
        self._parameters = dict(parameters)
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        # Parts of the summed vector: gradients, whether each is present, number of minibatches.
        self._sizes = [*sizes, len(sizes), 1]
        self._sum: OrderedSum | None = None
        self.first = 0
        self._round = 0  # since the last drain
        for name, parameter in self._parameters.items():
            if parameter.is_complex() and group is not None:
                raise ConfigError(
                    f"{name} is complex, but replicas average real gradients only",
                    remedy="store its real and imaginary parts as two parameters, or give the "
                    "stage one device",
                )

    def average(self, gradients: Gradients, *, minibatches: int = 1) -> dict[str, Tensor | None]:
        """Averages gradients over a round's minibatches; a grid adds them up. A collective.

        A parameter's gradient is None only if it is None on all replicas; otherwise a missing one
        counts as zero. Computed in float32, or in float64 if a parameter is float64. The result
        lies in memory that the next call overwrites.

        Args:
            gradients: mean over this replica's minibatches, by name.
            minibatches: number of those; 0, with empty ``gradients``, for a replica without one in
                a partial last round.
        """
        if self._grid:
            assert minibatches == 1, "a grid takes part in every round"
            return self.total(gradients)
        first = self.first + self._round * self.count
        what = f"averaging the gradients of minibatches {first} to {first + self.count - 1}"
        found = self._summed(gradients, what, minibatches=minibatches)
        self._round += 1
        return found

    def total(self, gradients: Gradients, *, excess: float = 0.0) -> dict[str, Tensor | None]:
        """The sum of all replicas' gradients, divided by 1 + the sum of their ``excess``, which the
        ranks of a grid have in common; a collective.
        """
        what = f"adding up the gradients of minibatch {self.first}"
        return self._summed(gradients, what, excess=excess)

    def _summed(
        self,
        gradients: Gradients,
        what: str,
        *,
        minibatches: int | None = None,
        excess: float = 0.0,
    ) -> dict[str, Tensor | None]:
        """Sums gradients; divides by the sum of ``minibatches``, or by 1 + that of ``excess``."""
        if self._group is None or not self._parameters:
            for gradient in gradients.values():
                if excess and gradient is not None:
                    gradient.div_(1 + excess)
            return dict(gradients)
        assert gradients.keys() == self._parameters.keys() or not (minibatches or gradients)
        if self._sum is None:
            dtypes = {parameter.dtype for parameter in self._parameters.values()}
            dtype = torch.float64 if torch.float64 in dtypes else torch.float32
            device = next(p.device for p in self._parameters.values())
            length = sum(self._sizes)
            self._sum = OrderedSum(self._group, length=length, dtype=dtype, device=device)
        flat = self._sum.values
        *slots, present, count = flat.split_with_sizes(self._sizes)
        for (name, parameter), slot in zip(self._parameters.items(), slots, strict=True):
            if (gradient := gradients.get(name)) is None:
                slot.zero_()
            else:
                _in_layout_of(parameter, slot).copy_(gradient)
        if minibatches not in (None, 1):
            flat.mul_(minibatches)
        has = [gradients.get(name) is not None for name in self._parameters]
        present.copy_(torch.tensor(has, dtype=flat.dtype))
        count.fill_(excess if minibatches is None else minibatches)
        with collective(what, self._group):
            self._sum.reduce()
        everywhere = (present > 0).tolist()
        total = float(flat[-1])
        if minibatches is None:
            total = 1 + total / (dist.get_world_size(self._group) if self._grid else 1)
        assert total > 0 or not any(everywhere), "a round has a minibatch with a weight"
        if total not in (0, 1):
            flat.div_(total)
        named = zip(self._parameters.items(), slots, everywhere, strict=True)
        return {
            name: _in_layout_of(parameter, slot).to(parameter.dtype) if has_one else None
            for (name, parameter), slot, has_one in named
        }

    def gather(self, vector: Tensor) -> list[Tensor]:
        """Every replica's ``vector`` (same length and dtype), in replica order; a collective."""
        if self._group is None or self._grid:
            return [vector]
        mine = vector.cpu() if self._over_gloo else vector
        found = [torch.empty_like(mine) for _ in range(self.count)]
        with collective(f"gathering the statistics of minibatch {self.first}", self._group):
            dist.all_gather(found, mine, group=self._group)
        return [each.to(vector.device) for each in found]

    @torch.no_grad()
    def average_statistics_(self, buffers: Iterable[Tensor]) -> None:
        """Makes buffers equal on all replicas, in place; a collective, for drains.

        Floating-point buffers, such as the running statistics of batch norms, get their mean over
        the replicas; integers, such as counts of batches, the largest value.
        """
        if self._group is None or self._grid:
            return
        self._round = 0
        every = list(buffers)
        real = [buffer for buffer in every if buffer.is_floating_point()]
        whole = [b for b in every if not (b.is_floating_point() or b.is_complex())]
        with collective("averaging statistics at a drain", self._group):
            if real:
                # In double precision, the mean of equal float32 values is that value.
                values = torch.cat([buffer.reshape(-1).double() for buffer in real])
                device = real[0].device
                total = OrderedSum(
                    self._group, length=len(values), dtype=values.dtype, device=device
                )
                total.values.copy_(values)
                total.reduce()
                _fill(real, total.values / self.count)
            if whole:
                flat = torch.cat([buffer.reshape(-1).long() for buffer in whole])
                flat = flat.cpu() if self._over_gloo else flat
                dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._group)
                _fill(whole, flat)


def _fill(buffers: list[Tensor], flat: Tensor) -> None:
    parts = flat.split_with_sizes([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


def _in_layout_of(parameter: nn.Parameter, slot: Tensor) -> Tensor:
    """A flat slot in the shape of ``parameter`` and, if that is dense, in its memory layout."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return slot.as_strided(parameter.shape, parameter.stride())
    return slot.view(parameter.shape)
