"""One process that does what ranks of a synchronous pipeline do, by accumulating gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DistributedSampler

from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.sparse import SparseTensor
from tests.support.pipeline_cases import BATCH as DEALT
from tests.support.pipeline_cases import OPTIMIZERS, grouped, same
from tests.support.synchronous_cases import BATCH, SEED, Case, collated, dataset, make_net

CPU = torch.device("cpu")


def average_statistics(copies: Sequence[nn.Module]) -> None:
    """Gives replicas the mean of their buffers, and of counts the largest."""
    for buffers in zip(*(layers.buffers() for layers in copies), strict=True):
        if buffers[0].is_floating_point():
            agreed = torch.stack([b.double() for b in buffers]).mean(0)
        else:
            agreed = torch.stack(buffers).amax(0)
        for buffer in buffers:
            buffer.copy_(agreed)


class Accumulation:
    """The oracle: gradient accumulation in one process, over microbatches made of the samples.

    A stage has a copy for each of its replicas, since batch norms see other microbatches, and a
    gradient that is summed up in parts.
    """

    def __init__(self, case: Case, *, device: torch.device = CPU) -> None:
        self._case = case
        self._device = device
        self._data = dataset(case)
        self.net = make_net(case).to(device)
        bounds = [0, *case.cuts, len(self.net.layers)]
        self._copies = [
            [copy.deepcopy(self.net.layers[a:b]) for _ in range(count)]
            for (a, b), count in zip(pairwise(bounds), case.replicas, strict=True)
        ]
        self._firsts = bounds[:-1]
        self._newest = [
            [nn.Parameter(p.detach().clone()) for p in copies[0].parameters()]
            for copies in self._copies
        ]
        made = OPTIMIZERS.get(case.optimizer, grouped)
        self._optimizer = made([p for own in self._newest for p in own])
        self._random = KeyedRandomness(seed=SEED, device=device)
        self._step = 0
        self.losses: list[tuple[float, int]] = []  # of the microbatches of the last epoch
        self.norms: list[float] = []  # of gradients that were to be clipped
        self.step_loss = 0.0

    def train(self) -> None:
        for epoch in range(self._case.epochs):
            self.losses = []
            for batches in self._rounds(epoch):
                self._minibatch(batches)
            for copies in self._copies:
                average_statistics(copies)

    def _rounds(self, epoch: int) -> Iterator[list[list[int]]]:
        """Samples of each reader in a step; of the first ones in a partial last round."""
        readers = self._case.replicas[0]
        if self._case.dealt:
            batches = [[b * DEALT + i for i in range(DEALT)] for b in range(self._case.dealt)]
            yield from (batches[i : i + readers] for i in range(0, len(batches), readers))
            return
        mine = [list(range(len(self._data)))]
        if readers > 1:
            mine = []
            for reader in range(readers):
                # As Lightning makes them.
                sampler = DistributedSampler(
                    self._data, num_replicas=readers, rank=reader, seed=SEED
                )
                sampler.set_epoch(epoch)
                mine.append(list(sampler))
        for first in range(0, len(mine[0]), BATCH):
            yield [samples[first : first + BATCH] for samples in mine]

    def _minibatch(self, batches: list[list[int]]) -> None:
        total, readers = self._case.microbatches, self._case.replicas[0]
        shares: list[tuple[list[int], float]] = [([], 0.0)] * total
        for reader, samples in enumerate(batches):
            own = range(reader, total, readers)
            # As torch.tensor_split does: as even as can be, the larger ones first.
            cuts = torch.tensor_split(torch.tensor(samples), len(own))
            for number, part in zip(own, cuts, strict=True):
                shares[number] = part.tolist(), len(part) / len(samples) / len(batches)
        losses = {
            number: self._forward(number, samples) * weight
            for number, (samples, weight) in enumerate(shares)
            if samples
        }
        for number in reversed(losses) if self._case.schedule == "gpipe" else losses:
            losses[number].backward()
        self.step_loss = sum(float(loss.detach()) for loss in losses.values())
        for number, loss in losses.items():
            samples, weight = shares[number]
            self.losses.append((float(loss.detach()) / weight, len(samples)))
        self._update()
        self._step += 1

    def _forward(self, number: int, samples: list[int]) -> Tensor:
        batch = collated(self._case, [self._data[i] for i in samples])
        value, labels = (part.to(self._device) for part in batch)
        value = value.to(torch.float64) if self._case.precision == "64-true" else value
        keyed = self._case.keyed
        with self._random.preserved():
            for first, copies in zip(self._firsts, self._copies, strict=True):
                for place, layer in enumerate(copies[number % len(copies)]):
                    if keyed:
                        u = self._step * self._case.microbatches + number
                        self._random.key(minibatch=u, layer=first + place)
                    value = layer(value)
        return F.cross_entropy(value, labels)

    def _update(self) -> None:
        for newest, copies in zip(self._newest, self._copies, strict=True):
            for parameter, *every in zip(newest, *(c.parameters() for c in copies), strict=True):
                gradients = [p.grad for p in every if p.grad is not None]
                if not gradients:
                    assert not any(p.requires_grad for p in every)
                    continue
                total = gradients[0]
                for other in gradients[1:]:
                    total = total + other
                parameter.grad = total
        if self._case.clip is not None:
            own = [p for group in self._optimizer.param_groups for p in group["params"]]
            self.norms.append(float(nn.utils.clip_grad_norm_(own, self._case.clip)))
        self._optimizer.step()
        for newest, copies in zip(self._newest, self._copies, strict=True):
            for parameter, *every in zip(newest, *(c.parameters() for c in copies), strict=True):
                for other in every:
                    other.data.copy_(parameter.detach())
                    other.grad = None

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the names of the whole Sequential."""
        layers = [layer for copies in self._copies for layer in copies[0]]
        return {
            f"{number}.{name}": value
            for number, layer in enumerate(layers)
            for name, value in layer.state_dict().items()
        }


def check(
    case: Case, found: Sequence[Any], *, device: torch.device = CPU, rounding: float = 0.0
) -> None:
    """What ranks found against the oracle."""
    oracle = Accumulation(case, device=device)
    oracle.train()
    expected = oracle.state()
    of_epoch = sum(loss * samples for loss, samples in oracle.losses)
    of_epoch /= sum(samples for _, samples in oracle.losses)
    rel = max(1e-6, rounding)
    ranks = [(stage, i) for stage, count in enumerate(case.replicas) for i in range(count)]
    for (stage, replica), (state, told, most) in zip(ranks, found, strict=True):
        assert told["epoch"] == pytest.approx(of_epoch, rel=rel), f"{case}: loss"
        if max(case.replicas) == 1:  # every microbatch comes by every rank
            assert told["step"] == pytest.approx(oracle.step_loss, rel=rel), f"{case}: loss"
        assert state.keys() == expected.keys()
        for name, value in state.items():
            # Sums are made in the same order everywhere, so that not even rounding differs.
            assert same(value, expected[name], rounding=rounding), f"{case}: {name}"
        if most is not None:
            own = len(range(replica, case.microbatches, case.replicas[stage]))
            ahead = (sum(case.replicas[stage:]) - 1) // case.replicas[stage]
            bound = {"gpipe": own, "1f1b": ahead + 1, "eager_1f1b": 2 * ahead + 1}
            assert most == min(own, bound[case.schedule]), str(case)


class Noting(nn.Module):
    """A batch norm that keeps all that it sees, until its statistics move by that."""

    def __init__(self, norm: _BatchNorm, *, mode: str, by_hand: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer.clone())
        self._momentum, self._eps = norm.momentum, norm.eps
        self._mode, self._by_hand = mode, by_hand
        self.seen: list[Tensor] = []

    def forward(self, value: Any) -> Any:
        if isinstance(value, SparseTensor):
            return value.replace_feats(self._normalised(value.feats))
        return self._normalised(value)

    def _normalised(self, x_NC: Tensor) -> Tensor:
        self.seen.append(x_NC.detach().clone())
        running = self._mode == "running"
        if not self._by_hand:
            kept = (self.running_mean, self.running_var) if running else (None, None)
            return F.batch_norm(
                x_NC, *kept, self.weight, self.bias, training=not running, eps=self._eps
            )
        mean_C = self.running_mean if running else x_NC.mean(0)
        var_C = self.running_var if running else x_NC.var(0, correction=0)
        return (x_NC - mean_C) / (var_C + self._eps).sqrt() * self.weight + self.bias

    def move(self, every: Sequence[Noting]) -> None:
        """Moves the statistics by all that these have seen, in double precision."""
        x_NC = torch.cat([x for norm in every for x in norm.seen]).double()
        self.num_batches_tracked += 1
        share = 1 / int(self.num_batches_tracked) if self._momentum is None else self._momentum
        for kept, new in ((self.running_mean, x_NC.mean(0)), (self.running_var, x_NC.var(0))):
            kept.copy_((1 - share) * kept.double() + share * new)


class Normed(Accumulation):
    """Gradient accumulation in one process with such norms."""

    def __init__(self, case: Case, *, by_hand: bool = False) -> None:
        super().__init__(case)
        for copies in self._copies:
            for layers in copies:
                for name, norm in list(layers.named_modules()):
                    if isinstance(norm, _BatchNorm):
                        noting = Noting(norm, mode=case.batch_norm, by_hand=by_hand)
                        layers.set_submodule(name, noting)

    def _minibatch(self, batches: list[list[int]]) -> None:
        super()._minibatch(batches)
        for copies in self._copies:
            for modules in zip(*(layers.modules() for layers in copies), strict=True):
                norms = [module for module in modules if isinstance(module, Noting)]
                for norm in norms:
                    norm.move(norms)
                for norm in norms:
                    norm.seen.clear()


def whole(case: Case, *, by_hand: bool = False) -> Normed:
    """One process that takes each minibatch in one piece, in double precision.

    So it has next to no rounding of its own, and what differs is that of who is compared with it.
    """
    one = Normed(dataclasses.replace(case, config="1", microbatches=1), by_hand=by_hand)
    (layers,), (newest,) = one._copies[0], one._newest
    layers.double()[0].register_forward_pre_hook(_doubled)
    for parameter in newest:
        parameter.data = parameter.data.double()
    return one


def _doubled(_: nn.Module, given: tuple[Any]) -> Any:
    (value,) = given
    return value.replace_feats(value.feats.double()) if hasattr(value, "feats") else value.double()


def distance(value: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest element."""
    return float((value.double() - expected.double()).abs().max() / expected.abs().max())
