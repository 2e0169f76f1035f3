"""What ranks store where their stages recompute, by torch's own count, against sizes of layers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pipeline_cases import CLASSES, QUIET, Net
from processes import run
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

from sparsepipe.strategies import SynchronousPipelineStrategy

CUT, PARTS, PART = 8, 4, 4
WIDTH, SIDE = 8, 32  # activations of a power of two of bytes, as the buffers that receive them
BATCH = PARTS * PART


def layers() -> nn.Sequential:
    """Few weights and large activations; logits and losses are small."""
    blocks: list[nn.Module] = []
    for number in range(5):
        before = WIDTH if number else 1
        blocks += [nn.Conv2d(before, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        blocks += [nn.Dropout(0.1)] * (number == 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def sizes(first: int, end: int) -> tuple[int, int]:
    """Bytes of a microbatch: the input of some layers, and what else they save, by running them."""
    value, network = torch.randn(PART, 1, SIDE, SIDE), layers()
    for layer in network[:first]:
        value = layer(value).detach()
    value.requires_grad_(first > 0)
    there = {place_of(t) for t in (value, *network.parameters(), *network.buffers())}
    seen: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        seen.setdefault(place_of(tensor), tensor.detach())
        return tensor

    output = value
    with saved_tensors_hooks(note, lambda tensor: tensor):
        for layer in network[first:end]:
            output = layer(output)
    inside = sum(t.untyped_storage().nbytes() for p, t in seen.items() if p not in there)
    return value.nbytes, inside


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Held:
    """What autograd keeps in place of a tensor that it saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Made(TorchDispatchMode):
    """Counts the storages that operators of this thread make, until they are freed.

    Attributes:
        bytes: of those that were made since :meth:`restart`, and are there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._known: Any = WeakIdKeyDictionary()
        self._since = 0

    def restart(self) -> None:
        self.bytes = 0
        self._since += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in storages((args, kwargs)):
            self._known.setdefault(storage, True)
        found = func(*args, **(kwargs or {}))
        for storage in storages(found):
            if storage not in self._known:
                self._known[storage] = True
                self.bytes += storage.nbytes()
                gone = weakref.finalize(storage, self._gone, storage.nbytes(), self._since)
                gone.atexit = False
        return found

    def _gone(self, size: int, since: int) -> None:
        if since == self._since:
            self.bytes -= size


def storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Stored(pl.Callback):
    """Bytes of the storages that autograd keeps in a step, but those of weights and buffers.

    Attributes:
        kept: most at a time that was saved where nothing is recomputed: also the inputs of spans.
        again: most that there was of what a second run of this rank's layers had made, when it was
            through with them.
    """

    def __init__(self) -> None:
        self.kept = self.again = self._latest = 0
        self._users: dict[int, int] = {}  # of a storage
        self._bytes: dict[int, int] = {}
        self._made = Made()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        own = (*pl_module.parameters(), *pl_module.buffers())
        self._own = {place_of(tensor) for tensor in own}
        plan, rank = trainer.strategy.plan, trainer.global_rank
        first, last = plan.stages[plan.stage_of(rank)].layers
        pl_module.layers[first].register_forward_pre_hook(self._begins)
        for layer in pl_module.layers[first : last + 1]:
            layer.register_forward_hook(self._ran)

    def on_train_batch_start(self, *_: Any) -> None:
        self._hooks = saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._hooks.__enter__()
        self._made.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self._begins()
        self._made.__exit__(None, None, None)
        self._hooks.__exit__(None, None, None)
        assert not self._users, "nothing is kept between steps"

    def _pack(self, tensor: Tensor) -> Held:
        held, place = Held(tensor), place_of(tensor)
        if place not in self._own and tensor.numel():
            self._users[place] = self._users.get(place, 0) + 1
            self._bytes[place] = tensor.untyped_storage().nbytes()
            weakref.finalize(held, self._gone, place).atexit = False
            self.kept = max(self.kept, sum(self._bytes[each] for each in self._users))
        return held

    def _gone(self, place: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]

    def _begins(self, *_: Any) -> None:
        self.again = max(self.again, self._latest)
        self._latest = 0
        self._made.restart()

    def _ran(self, *_: Any) -> None:
        if in_backward():
            self._latest = self._made.bytes


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def train(rank: int, schedule: Any, recompute: Any) -> tuple[int, int, int]:
    """Most bytes that this rank keeps, and makes anew; microbatches in flight."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2 * BATCH, 1, SIDE, SIDE), torch.zeros(2 * BATCH).long())
    strategy = SynchronousPipelineStrategy(
        schedule=schedule,
        microbatches=PARTS,
        config="1-1",
        cuts=[CUT],
        recompute=recompute,
        timeout_s=60,
    )
    stored = Stored()
    trainer = pl.Trainer(
        **QUIET, devices=2, max_epochs=1, strategy=strategy, callbacks=[stored, most := Most()]
    )
    trainer.fit(Net(layers()), DataLoader(data, batch_size=BATCH))
    return stored.kept, stored.again, most.in_flight


class Most(pl.Callback):
    in_flight = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.in_flight = trainer.strategy.pipeline.worker.most_in_flight


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [pytest.param("gpipe", [PARTS, PARTS], marks=pytest.mark.full), ("1f1b", [2, 1])],
)
def test_inputs_of_all_in_flight_and_the_inside_of_one(schedule: str, in_flight: list[int]) -> None:
    plain = run(train, 2, schedule, "none", limit_s=60)
    whole = run(train, 2, schedule, "all", limit_s=60)
    bounds = [(0, CUT), (CUT, len(layers()))]
    for stage, (first, end) in enumerate(bounds):
        received, inside = sizes(first, end)
        kept, again, most = plain[stage]
        assert (again, most) == (0, in_flight[stage])
        assert kept == pytest.approx(most * (received + inside), rel=0.1), stage
        kept, again, most = whole[stage]
        assert most == in_flight[stage]
        if stage:  # the first one's inputs are parts of the batch, all of which is there
            assert kept == pytest.approx(most * received, rel=0.1)
        assert kept + again == pytest.approx(most * received + inside, rel=0.1), stage
