"""Microbatches: empty ones, when their steps begin, batch norms, and what is stored of them."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate

from sparsepipe import sparse
from sparsepipe.errors import ConfigError
from sparsepipe.sparse import Conv3d, ReLU, SparseTensor, sparse_collate
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.pipeline_cases import (
    CLASSES,
    QUIET,
    Dense,
    Net,
    collate_sparse,
    dense_layers,
    plain_trainer,
    weights,
)
from tests.support.processes import outcomes, run
from tests.support.synchronous_cases import Case, drop_layers, make_net, train_one
from tests.support.synchronous_cases import loader as case_loader


def fitted(
    layers: Any,
    *,
    samples: int,
    batch_size: int,
    epochs: int = 2,
    **options: Any,
) -> Net:
    torch.manual_seed(11)
    module = Net(layers())
    strategy = SynchronousPipelineStrategy(timeout_s=60, **options)
    devices = sum(map(int, options.get("config", "1").split("-")))
    trainer = pl.Trainer(**QUIET, devices=devices, max_epochs=epochs, strategy=strategy)
    trainer.fit(module, DataLoader(Dense(samples), batch_size=batch_size))
    return module


@pytest.mark.parametrize("mode", ["microbatch", "deferred"])
@pytest.mark.parametrize(
    ("samples", "parts", "where"),
    [
        (8, 3, "forward of microbatch 1 of minibatch 0"),  # of 2, 1 and 1
        (17, 2, "forward of microbatch 0 of minibatch 4"),  # the epoch's last batch is one sample
    ],
)
def test_a_batch_norm_with_a_single_value_is_refused(
    mode: Any, samples: int, parts: int, where: str
) -> None:
    with pytest.raises(ConfigError, match="a microbatch that has 1 sample") as refused:
        fitted(dense_layers, samples=samples, batch_size=4, microbatches=parts, batch_norm=mode)
    assert "more than 1 value per channel" in refused.value.message, "as torch says"
    for way in (f"fewer microbatches than {parts}", "drop_last=True", "batch_norm=running"):
        assert way in refused.value.remedy
    assert any(where in note for note in refused.value.__notes__)


def test_running_batch_norms_take_single_samples() -> None:
    net = fitted(dense_layers, samples=17, batch_size=4, microbatches=3, batch_norm="running")
    assert all(value.isfinite().all() for value in net.state_dict().values())


def in_stages(rank: int) -> None:
    fitted(dense_layers, samples=8, batch_size=4, microbatches=3, config="1-1", cuts=[1])


def test_the_rank_of_the_norm_explains_and_others_name_that_rank() -> None:
    first, last = outcomes(in_stages, 2, limit_s=60)  # norms are in the last stage
    assert isinstance(last.error, ConfigError)
    assert "a microbatch that has 1 sample" in last.error.message
    assert "rank 1 (stage 1) is gone" in str(first.error)


CUTS = {"1": [], "1-1": [3], "2-1": [3], "1-1-1": [2, 4]}


class Noting(Net):
    """Notes microbatches as its step begins, and as the gradient comes to its first layer."""

    def __init__(self, *, failing: int | None = None) -> None:
        super().__init__(dense_layers())
        self.notes: list[str] = []
        self.failing = failing
        self.layers[0].register_full_backward_hook(lambda *_: self.notes.append("back"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opened = self.notes.count("open")
        self.notes.append("open")
        if opened == self.failing:
            raise ArithmeticError("before the layers")
        return super().training_step(batch, batch_idx)


def readers_and_ranks(config: str) -> tuple[int, int]:
    replicas = [int(part) for part in config.split("-")]
    return replicas[0], sum(replicas)


def train(net: Net, config: str, schedule: str, microbatches: int, **options: Any) -> None:
    """One minibatch of 16 samples for each reader."""
    readers, devices = readers_and_ranks(config)
    strategy = SynchronousPipelineStrategy(
        schedule=schedule,
        microbatches=microbatches,
        config=config,
        cuts=CUTS[config],
        timeout_s=60,
        **options,
    )
    trainer = pl.Trainer(**QUIET, devices=devices, max_epochs=1, strategy=strategy)
    trainer.fit(net, DataLoader(Dense(16 * readers), batch_size=16))


def noted(rank: int, config: str, schedule: str, microbatches: int) -> str:
    net = Noting()
    train(net, config, schedule, microbatches)
    return " ".join(net.notes)


@pytest.mark.parametrize(
    ("config", "schedule", "microbatches", "expected"),
    [
        ("1-1", "1f1b", 4, "open open open back open back back back"),
        ("1-1", "eager_1f1b", 5, "open open open open back open back back back back"),
        ("1-1", "gpipe", 4, "open open open open back back back back"),
        ("1-1-1", "1f1b", 6, "open open open open back open back open back back back back"),
        ("2-1", "1f1b", 8, "open open open back open back back back"),
        ("1", "1f1b", 3, "open back open back open back"),
    ],
)
def test_the_next_microbatch_opens_before_the_wait_for_a_gradient(
    config: str, schedule: str, microbatches: int, expected: str
) -> None:
    """No more than one is ahead; on one device there is no wait, hence none."""
    readers, ranks = readers_and_ranks(config)
    found = run(noted, ranks, config, schedule, microbatches)
    assert found[:readers] == [expected] * readers


def failing(rank: int) -> None:
    train(Noting(failing=2), "1-1", "1f1b", 4)


def test_the_error_names_the_forward_of_that_microbatch() -> None:
    first, _ = outcomes(failing, 2, limit_s=60)
    assert isinstance(first.error, ArithmeticError)
    assert first.error.__notes__ == ["rank 0, stage 0: forward of microbatch 2 of minibatch 0"]


class Drawing(Net):
    """Draws before the layers, as its dropout does within them, from the same generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layers(x + torch.rand(len(x), 1)), y)


def drawn(rank: int, recompute: str) -> Any:
    torch.manual_seed(3)
    net = Drawing(drop_layers())
    train(net, "1-1", "1f1b", 4, recompute=recompute)
    return weights(net)


def test_a_second_run_of_layers_draws_nothing_of_the_microbatch_that_is_ahead() -> None:
    """It comes after that microbatch's own draws, which go on where they were."""
    kept, again = run(drawn, 2, "none")[0], run(drawn, 2, "all")[0]
    assert all(torch.equal(value, kept[name]) for name, value in again.items())


SITES, SAMPLES, BATCH = 20, 14, 6  # as many sites in each sample: their mean is that of samples


class Segments(pl.LightningModule):
    """Tells the class of each voxel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            Conv3d(1, 8), ReLU(), Conv3d(8, 8), ReLU(), Conv3d(8, CLASSES, 1, bias=True)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        labels = labels.feats[:, 0] if isinstance(labels, SparseTensor) else labels
        return F.cross_entropy(self.layers(x).feats, labels.long())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(*, sparse: bool) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    samples = []
    for _ in range(SAMPLES):
        places = torch.randperm(6**3, generator=draw)[:SITES]
        coords = torch.stack([places // 36, places // 6 % 6, places % 6], dim=1)
        feats = torch.randn(SITES, 1, generator=draw)
        samples.append((coords, feats, torch.randint(CLASSES, (SITES,), generator=draw)))

    def collate(items: list[Any]) -> Any:
        x = sparse_collate([(c, f) for c, f, _ in items], spatial_shape=(6, 6, 6))
        if not sparse:
            return x, torch.cat([labels for _, _, labels in items])
        of_voxels = [(c, labels[:, None].float()) for c, _, labels in items]
        return x, sparse_collate(of_voxels, spatial_shape=(6, 6, 6))

    return DataLoader(samples, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]


def labels_in_stages(rank: int) -> dict[str, Tensor]:
    net = Segments()
    strategy = SynchronousPipelineStrategy(microbatches=4, config="1-1", cuts=[2], timeout_s=60)
    trainer = pl.Trainer(**QUIET, devices=2, max_epochs=2, strategy=strategy)
    trainer.fit(net, loader(sparse=True))
    return weights(net)


def test_they_travel_as_feats_of_a_sparse_tensor() -> None:
    """Training is that of plain labels on one device, which cuts nothing."""
    net = Segments()
    plain_trainer(max_epochs=2).fit(net, loader(sparse=False))
    for state in run(labels_in_stages, 2):
        assert state.keys() == weights(net).keys()
        for name, value in weights(net).items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def of(mode: str, config: str, parts: int, schedule: str = "gpipe", **options: Any) -> Case:
    net = options.pop("net", "dense")
    samples = options.pop("samples", 34)
    return Case(config, parts, schedule, net=net, samples=samples, batch_norm=mode, **options)


STOPPED = of("running", "1-1", 3)


def norms_fitted(
    case: Case, epochs: int, *, ckpt_path: str | None = None
) -> tuple[pl.Trainer, Net]:
    strategy = SynchronousPipelineStrategy(
        microbatches=case.microbatches,
        batch_norm=case.batch_norm,  # type: ignore[arg-type]
        config=case.config,
        cuts=case.cuts,
        timeout_s=60,
    )
    trainer = pl.Trainer(
        **QUIET,
        devices=sum(case.replicas),
        max_epochs=epochs,
        strategy=strategy,
    )
    net = make_net(case)
    trainer.fit(net, case_loader(case, 0), case_loader(case, 0), ckpt_path=ckpt_path)
    return trainer, net


def saving(rank: int, path: Path) -> tuple[dict[str, Tensor], float, list[str]]:
    """A run of one epoch that leaves a checkpoint."""
    trainer, net = norms_fitted(STOPPED, 1)
    trainer.save_checkpoint(path)
    patched = [name for name, module in net.named_modules() if "forward" in vars(module)]
    assert [type(layer) for layer in net.layers] == [type(layer) for layer in dense_layers()]
    return weights(net), float(trainer.callback_metrics["val_loss"]), patched


def test_checkpoints_are_those_of_any_run(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    (state, loss, patched), _ = run(saving, 2, path)
    assert not patched
    # A plain Trainer has the same to load, and normalises by it in evaluation.
    plain = make_net(STOPPED)
    assert state.keys() == plain.state_dict().keys()
    trainer = plain_trainer()
    (told,) = trainer.validate(plain, case_loader(STOPPED, 0), ckpt_path=str(path), verbose=False)
    assert told["val_loss"] == pytest.approx(loss, rel=1e-6)
    # Another plan goes on as if nothing had happened: a minibatch leaves nothing but buffers.
    alone = dataclasses.replace(STOPPED, config="1")
    _, resumed = norms_fitted(alone, 2, ckpt_path=str(path))
    _, straight = norms_fitted(alone, 2)
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_unknown_norms_are_refused_in_training_only() -> None:
    case = of("deferred", "1", 2)
    net = Net(nn.Sequential(nn.Linear(6, 8), Own(8), nn.Linear(8, CLASSES)))
    strategy = SynchronousPipelineStrategy(microbatches=2, batch_norm="deferred")
    trainer = pl.Trainer(**QUIET, devices=1, max_epochs=1, strategy=strategy)
    trainer.validate(net, case_loader(case, 0), verbose=False)
    with pytest.raises(ConfigError, match=r"layers\.1 is a Own with a forward of its own"):
        trainer.fit(net, case_loader(case, 0))


REFUSED: dict[str, Any] = {
    "'some' is not none, all, auto": "some",
    "layer 3 is named twice": {"layers": [[1, 3], 3]},
    "'auto' chooses layers by a profile": "auto",
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
        ({"layers": [9]}, "last layer of the network is 8, not 9"),
        ({"stages": [1, 2]}, r"last stage of the plan \(1-1\) is 1, not 2"),
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


SPARSE_WIDTH, SITES_OF_ALL = 32, 256  # of the 512 of a grid, so that all microbatches are as large


STORED_BATCH = PARTS * PART


def large_dense_layers() -> nn.Sequential:
    """Few weights and large activations; logits and losses are small."""
    blocks: list[nn.Module] = []
    for number in range(5):
        before = WIDTH if number else 1
        blocks += [nn.Conv2d(before, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        blocks += [nn.Dropout(0.1)] * (number == 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def large_sparse_layers() -> nn.Sequential:
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
        return 2 * STORED_BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        if not self._sparse:
            return torch.randn(1, SIDE, SIDE, generator=draw), torch.tensor(0)
        sites = torch.randperm(8**3, generator=draw)[:SITES_OF_ALL]
        return torch.stack([sites // 64, sites // 8 % 8, sites % 8], dim=1), torch.tensor(0)


LAYERS = {"dense": large_dense_layers, "sparse": large_sparse_layers}


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
        data = DataLoader(Samples(net), batch_size=STORED_BATCH, collate_fn=COLLATE[net])
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
