"""Stages that recompute activations train to the same weights, and store less."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate

from sparsepipe import sparse
from sparsepipe.errors import ConfigError
from sparsepipe.sparse import SparseTensor
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.pipeline_cases import CLASSES, QUIET, Net, collate_sparse
from tests.support.processes import outcomes, run
from tests.support.synchronous_cases import Case, train_one

REFUSED: dict[str, Any] = {
    "'some' does not say which layers": "some",
    "layer 3 is named twice": {"layers": [[1, 3], 3]},
    "'auto' has layers chosen by a profile": "auto",
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_suit_no_plan_are_refused_at_once(message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SynchronousPipelineStrategy(recompute=REFUSED[message])
    assert message in refused.value.message
    assert refused.value.remedy


def train_one_of(rank: int, case: Case) -> None:
    train_one(case, rank)


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ({"layers": [[2, 4]]}, r"layer 2 \(ReLU\) works in place .* of layers 2 to 3$"),
        ({"layers": [9]}, "has layers 0 to 8, not 9"),
        ({"stages": [1, 2]}, r"has stages 0 to 1, not \[1, 2\]"),
    ],
)
def test_settings_that_do_not_suit_the_plan_are_refused_on_every_rank(
    recompute: Any, message: str
) -> None:
    case = Case("1-1", 2, net="norm_drop", recompute=recompute)
    for end in outcomes(train_one_of, 2, case, limit_s=60):
        assert isinstance(end.error, ConfigError)
        assert re.search(message, end.error.message)
        assert end.error.remedy


CUT, PARTS, PART = 8, 4, 4


# Activations of a power of two of bytes, as the buffers that receive them.
WIDTH, SIDE = 8, 32


SPARSE_WIDTH, SITES = 32, 256  # of the 512 of a grid, so that all microbatches are as large


BATCH = PARTS * PART


def dense_layers() -> nn.Sequential:
    """Few weights and large activations; logits and losses are small."""
    blocks: list[nn.Module] = []
    for number in range(5):
        before = WIDTH if number else 1
        blocks += [nn.Conv2d(before, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        blocks += [nn.Dropout(0.1)] * (number == 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def sparse_layers() -> nn.Sequential:
    """Both stages begin on all sites, the last one ends on coarser ones."""
    blocks: list[nn.Module] = []
    for number in range(5):
        before = SPARSE_WIDTH if number else 1
        blocks += [sparse.Conv3d(before, SPARSE_WIDTH, 3), sparse.BatchNorm(SPARSE_WIDTH)]
        blocks += [sparse.ReLU()]
        blocks += [sparse.Dropout(0.1)] * (number == 1) + [sparse.MaxPool3d(2)] * (number == 3)
    return nn.Sequential(*blocks, sparse.GlobalMaxPool(), nn.Linear(SPARSE_WIDTH, CLASSES))


class Samples(Dataset[Any]):
    """Images, or as many sites each, without anything to learn."""

    def __init__(self, net: str) -> None:
        self._sparse = net == "sparse"

    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        if not self._sparse:
            return torch.randn(1, SIDE, SIDE, generator=draw), torch.tensor(0)
        sites = torch.randperm(8**3, generator=draw)[:SITES]
        return torch.stack([sites // 64, sites // 8 % 8, sites % 8], dim=1), torch.tensor(0)


LAYERS = {"dense": dense_layers, "sparse": sparse_layers}


COLLATE = {"dense": default_collate, "sparse": collate_sparse}


def received(net: str, network: nn.Sequential) -> Any:
    """A microbatch behind some layers, as another rank would get it."""
    data = Samples(net)
    value, _ = COLLATE[net]([data[number] for number in range(PART)])
    value = network(value)
    if not isinstance(value, SparseTensor):
        return value.detach().requires_grad_(len(network) > 0)
    feats_NC = value.feats.detach().requires_grad_(len(network) > 0)
    return SparseTensor(
        feats_NC, value.coords, spatial_shape=value.spatial_shape, batch_size=value.batch_size
    )


def sizes(net: str, first: int, end: int) -> tuple[int, int]:
    """Bytes of a microbatch's input of some layers, and of what else they save, by running them."""
    network = LAYERS[net]()
    network[first:end](received(net, network[:first]))  # what layers make once for ever is there
    value = received(net, network[:first])
    own = (*tree_leaves(value), *network.parameters(), *network.buffers())
    there = {place_of(tensor) for tensor in own}
    seen: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        # Not the tensor itself, which holds the graph that would hold it.
        return seen.setdefault(place_of(tensor), tensor.detach())

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = network[first:end](value)
    inside = sum(t.untyped_storage().nbytes() for p, t in seen.items() if p not in there)
    seen.clear()
    del output
    return feats_of(value).nbytes, inside


def feats_of(value: Any) -> Tensor:
    return value.feats if isinstance(value, SparseTensor) else value


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Held:
    """What autograd keeps in place of a tensor that it saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Stored(pl.Callback):
    """Bytes of the storages that autograd keeps in a step, but those of weights and buffers.

    Attributes:
        kept: most at a time that was saved where nothing is recomputed: also the inputs of spans.
        in_flight: most microbatches at a time.
    """

    def __init__(self) -> None:
        self.kept = self.in_flight = 0
        self._users: dict[int, int] = {}  # of a storage
        self._bytes: dict[int, int] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._own = {place_of(t) for t in (*pl_module.parameters(), *pl_module.buffers())}

    def on_train_batch_start(self, *_: Any) -> None:
        self._hooks = saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._hooks.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._hooks.__exit__(None, None, None)
        assert not self._users, "nothing is kept between steps"
        self.in_flight = trainer.strategy.pipeline.worker.most_in_flight

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


def train_measured(rank: int, net: str, schedule: Any) -> list[tuple[int, int]]:
    """Most bytes kept and microbatches in flight, where nothing is recomputed, and where all is."""
    found = []
    for recompute in ("none", "all"):
        torch.manual_seed(0)
        strategy = SynchronousPipelineStrategy(
            schedule=schedule,
            microbatches=PARTS,
            config="1-1",
            cuts=[CUT],
            recompute=recompute,
            timeout_s=60,
        )
        trainer = pl.Trainer(
            **QUIET, devices=2, max_epochs=1, strategy=strategy, callbacks=[stored := Stored()]
        )
        data = DataLoader(Samples(net), batch_size=BATCH, collate_fn=COLLATE[net])
        trainer.fit(Net(LAYERS[net]()), data)
        found.append((stored.kept, stored.in_flight))
    return found


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [pytest.param("gpipe", [PARTS, PARTS], marks=pytest.mark.full), ("1f1b", [2, 1])],
)
@pytest.mark.parametrize("net", LAYERS)
def test_inputs_of_all_in_flight_are_kept_and_nothing_else(
    net: str, schedule: str, in_flight: Sequence[int]
) -> None:
    everyone = run(train_measured, 2, net, schedule, limit_s=60)
    bounds = [(0, CUT), (CUT, len(LAYERS[net]()))]
    for stage, ((first, end), (plain, whole)) in enumerate(zip(bounds, everyone, strict=True)):
        boundary, inside = sizes(net, first, end)
        most = in_flight[stage]
        assert (plain[1], whole[1]) == (most, most)
        assert plain[0] == pytest.approx(most * (boundary + inside), rel=0.1), stage
        if stage:  # the first one's inputs are parts of the batch, all of which is there
            assert whole[0] == pytest.approx(most * boundary, rel=0.1)
