"""A step in two halves, before and after its call of the layers, does what it does in one."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.sparse import SparseTensor
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from sparsepipe.strategies.pipeline.steps import (
    generators_of,
    in_place_of,
    run_from_layers,
    run_until_layers,
    without_input,
)
from tests.support.pipeline_cases import (
    CLASSES,
    QUIET,
    Dense,
    Net,
    dealt,
    dense_layers,
    make_loader,
    pipeline_trainer,
    plain_trainer,
    weights,
)
from tests.support.processes import outcomes, run
from tests.support.synchronous_cases import drop_layers

Step = Callable[[nn.Sequential, Any], Any]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))


def plain(net: nn.Sequential, batch: Any) -> Any:
    return net(batch["x"]).sum()


def mixed_up(net: nn.Sequential, batch: Any) -> Any:
    """Mixes samples, and their labels alike after the layers."""
    order = torch.randperm(len(batch["x"]))
    share = random.random() + float(np.random.rand())  # noqa: NPY002
    output = net(batch["x"] * share)
    return (output * batch["y"][order, None]).sum() + torch.rand(())


def in_halves(step: Step, batch: Any, *, send_input: bool = False) -> Any:
    net = layers()
    opened = run_until_layers(net, lambda: step(net, batch))
    rest = batch if send_input else without_input(batch, opened.value)
    rest, drawn = pickle.loads(pickle.dumps((rest, opened.randomness)))
    return run_from_layers(
        net,
        lambda: step(net, rest),
        run=lambda: net_of(net, opened.value),
        randomness=drawn,
        input_sent=send_input,
    )


def net_of(net: nn.Sequential, value: Any) -> Any:
    for layer in net:
        value = layer(value)
    return value


def seeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    return function()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3), "y": torch.randn(4)}


@pytest.mark.parametrize("step", [plain, mixed_up])
def test_halves_make_a_whole(step: Step, batch: dict[str, Tensor]) -> None:
    def whole() -> Any:
        net = layers()
        return step(net, batch)

    assert torch.equal(seeded(lambda: in_halves(step, batch)), seeded(whole))


class Drawing(nn.Module):
    """Draws from generators of every kind, before the layers and after them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = layers()
        self.layers[1].rng = random.Random(seed)
        self.torchs = torch.Generator().manual_seed(seed)
        self.numpys = np.random.default_rng(seed)
        self.philox = np.random.Generator(np.random.Philox(seed))
        self.pythons = random.Random(seed)
        self.twister = np.random.RandomState(seed)
        self.child = nn.Module()
        self.child.rng = random.Random(seed)  # type: ignore[assignment]
        self.system = random.SystemRandom()
        self.unused = random.Random(seed)

    def draw(self) -> list[float]:
        return [
            float(torch.rand((), generator=self.torchs)),
            float(self.numpys.random()),
            float(self.philox.random()),
            self.pythons.random(),
            float(self.twister.standard_normal()),
            self.child.rng.random(),
        ]

    def forward(self, batch: Any) -> Any:
        before = self.draw()
        output = self.layers(batch["x"] * sum(before))
        return before, output.sum(), self.draw()


def test_generators_of_ones_own_draw_alike_in_both_halves(batch: dict[str, Tensor]) -> None:
    """And then the second half goes on with its own."""
    first, last, alone = Drawing(1), Drawing(2), Drawing(2)
    whole = Drawing(1).draw()
    opened = run_until_layers(first.layers, lambda: first(batch), module=first)
    drawn = pickle.loads(pickle.dumps(opened.randomness))
    assert set(drawn) == {
        "self.torchs",
        "self.numpys",
        "self.philox",
        "self.pythons",
        "self.twister",
        "self.child.rng",
    }
    assert set(generators_of(first, first.layers)) - set(drawn) == {
        "torch",
        "numpy",
        "python",
        "self.unused",
    }
    before, _, after = run_from_layers(
        last.layers,
        lambda: last(batch),
        run=lambda: net_of(last.layers, opened.value),
        module=last,
        randomness=drawn,
    )
    assert before == whole
    assert after == alone.draw()


class Late(Drawing):
    """Makes its generator when it wants one."""

    def draw(self) -> list[float]:
        self.late = np.random.default_rng()
        return [float(self.late.random())]


def test_generators_that_ranks_do_not_share_are_refused(batch: dict[str, Tensor]) -> None:
    late = Late(1)
    with pytest.raises(ConfigError, match=r"makes a random generator, self\.late") as refused:
        run_until_layers(late.layers, lambda: late(batch), module=late)
    assert "__init__" in refused.value.remedy
    first, last = Drawing(1), Drawing(2)
    del last.pythons
    opened = run_until_layers(first.layers, lambda: first(batch), module=first)
    with pytest.raises(ConfigError, match=r"draws from self\.pythons") as refused:
        run_from_layers(
            last.layers,
            lambda: last(batch),
            run=lambda: opened.value,
            module=last,
            randomness=opened.randomness,
        )
    assert "__init__" in refused.value.remedy


def test_tensors_that_share_memory_with_the_input_are_left_out(batch: dict[str, Tensor]) -> None:
    rest = without_input({**batch, "view": batch["x"][1:]}, batch["x"][:, :2])
    assert rest["x"].is_meta
    assert rest["view"].is_meta
    assert rest["x"].shape == batch["x"].shape
    assert rest["y"] is batch["y"]


def uses_input(net: nn.Sequential, batch: Any) -> Any:
    return ((net(batch["x"]) - batch["x"]) ** 2).mean()


def only_input(net: nn.Sequential, batch: Any) -> Any:
    net(batch["x"])
    return batch["x"].sum()


def size_of_input(net: nn.Sequential, batch: Any) -> Any:
    return net(batch["x"].view(-1, 3)).sum() / len(batch["x"])


def test_use_of_the_input_after_the_layers_is_refused(batch: dict[str, Tensor]) -> None:
    for step in (uses_input, only_input):
        with pytest.raises(ConfigError, match="for more than calling them") as refused:
            in_halves(step, batch)
        assert "send_input=true" in refused.value.remedy
        in_halves(step, batch, send_input=True)
    in_halves(size_of_input, batch)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda net, batch: net(net(batch["x"])).sum(), "calls layers twice"),
        (lambda net, batch: batch["x"].sum(), "does not call layers"),
        (lambda net, batch: net(batch["x"] * nn.Parameter(torch.ones(3))), "needs a gradient"),
        (lambda net, batch: net(batch["x"], 1), "2 positional"),
    ],
)
def test_refused_steps(step: Step, message: str, batch: dict[str, Tensor]) -> None:
    """In two halves, and as a whole."""
    with pytest.raises(ConfigError, match=message) as refused:
        in_halves(step, batch)
    assert refused.value.remedy
    net = layers()
    with pytest.raises(ConfigError, match=message), in_place_of(net, lambda value: value):
        step(net, batch)
    assert "forward" not in vars(net)


def test_an_error_of_the_step_is_its_own(batch: dict[str, Tensor]) -> None:
    def broken(net: nn.Sequential, batch: Any) -> Any:
        net(batch["x"])
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        in_halves(broken, batch)


def test_a_sparse_tensor_is_left_out_as_a_whole_but_not_labels_on_its_sites() -> None:
    """Cast, it shares its coordinates with the input, and only these, as labels do."""
    coords = torch.tensor([[0, 1, 2, 3], [0, 3, 2, 1]], dtype=torch.int32)
    x = SparseTensor(torch.ones(2, 1), coords, batch_size=1)
    rest = without_input({"x": x, "y": coords.clone()}, x.to(torch.float64))
    assert rest["x"].feats.is_meta
    assert rest["x"].to(torch.float64).coords.is_meta
    assert not rest["y"].is_meta
    counts = x.replace_feats(torch.ones(2, 3))
    shared = without_input({"x": x, "label": counts}, x)
    assert shared["x"].feats.is_meta
    assert shared["label"].coords.is_meta
    assert shared["label"].feats is counts.feats
    both = {"x": x, "label": counts}  # of which either could be the input, cast
    assert without_input(both, x.to(torch.float64)) == both


class Mixing(Net):
    """Draws before the layers, and needs that after them: from all generators or one of its own."""

    def __init__(self, seed: int | None) -> None:
        torch.manual_seed(2)
        super().__init__(dense_layers())
        self.rng = None if seed is None else np.random.default_rng(seed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.rng is None:
            order, share = torch.randperm(len(x)), random.random()
        else:
            order, share = torch.from_numpy(self.rng.permutation(len(x))), float(self.rng.random())
        logits = self.layers(x * share + x[order] * (1 - share))
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def mixing(rank: int, config: str | None, own: bool) -> Any:
    """One minibatch an epoch, so that every stage trains on fresh weights."""
    net = Mixing(4 + rank if own else None)
    options: dict[str, Any] = {"max_epochs": 3 if own else 1, "limit_train_batches": 1}
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, [2, 4], **options)
    )
    torch.manual_seed(4 + rank)
    random.seed(4 + rank)
    trainer.fit(net, make_loader("dense", batches=1))
    return weights(net)


@pytest.mark.parametrize("own", [False, True])
def test_draws_before_the_layers_are_the_same_after_them(own: bool) -> None:
    (plain,) = run(mixing, 1, None, own)
    for state in run(mixing, 3, "1-1-1", own):
        assert all(torch.equal(value, plain[name]) for name, value in state.items())


SEEDED = {"PL_GLOBAL_SEED": "1"}  # as seed_everything leaves it


def dropout_net() -> Net:
    torch.manual_seed(2)
    return Net(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, CLASSES)))


def once(rank: int, seed: int | None) -> Any:
    os.environ.pop("PL_GLOBAL_SEED", None)  # of whatever ran before
    if seed is not None:
        pl.seed_everything(seed, verbose=False)
    net = dropout_net()  # of its own seed
    trainer = pipeline_trainer("1-1", [1], keyed_randomness=True, max_steps=1)
    loader = make_loader("dense", batches=1)
    if seed is None:
        trainer.validate(net, loader, verbose=False)  # nothing is keyed there
    trainer.fit(net, loader)
    return weights(net)


def test_keyed_draws_want_a_seed() -> None:
    """Else every run would have the same masks."""
    for end in outcomes(once, 2, None):
        assert isinstance(end.error, ConfigError), end
        assert "keyed_randomness" in end.error.message
        assert "seed_everything" in end.error.remedy
    one, two, again = (run(once, 2, seed)[0] for seed in (1, 2, 1))
    assert any(not torch.equal(value, two[name]) for name, value in one.items())
    assert all(torch.equal(value, again[name]) for name, value in one.items())


class Still(Net):
    """Learns nothing, so that its loss tells the masks alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def masked(rank: int, config: str, *fits: tuple[int, str, str]) -> list[float]:
    """The last epoch's loss of some fits: how many epochs, a checkpoint to read, one to write."""
    losses = []
    readers, cuts = int(config[0]), list(range(1, config.count("-") + 1))
    loader = dealt(5, readers=readers, reader=rank if rank < readers else 0)
    for epochs, source, target in fits:
        torch.manual_seed(2)
        net = Still(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES)))
        trainer = pipeline_trainer(config, cuts, keyed_randomness=True, max_epochs=epochs)
        trainer.fit(net, loader, ckpt_path=source or None)
        if target:
            trainer.save_checkpoint(target)
        losses.append(float(trainer.callback_metrics["loss"]))
    return losses


def test_keyed_draws_do_not_depend_on_the_plan_or_its_readers(tmp_path: Path) -> None:
    """Five minibatches, so that with two readers every epoch ends with a partial round."""
    saved = str(tmp_path / "one.ckpt")
    (one, two), *others = run(masked, 3, "2-1", (1, "", saved), (2, "", ""), environment=SEEDED)
    assert one != two
    assert others == [[one, two]] * 2
    fits = (1, "", ""), (2, "", ""), (2, saved, "")
    for config in ("1", "1-1", "1-1-1"):
        ranks = config.count("-") + 1
        assert run(masked, ranks, config, *fits, environment=SEEDED) == [[one, two, two]] * ranks


SAMPLES, BATCH, PARTS = 24, 8, 4
STEPS = SAMPLES // BATCH


class Whitened(Net):
    """Counts its steps and normalises what it gives to the layers; uses that afterwards too."""

    def __init__(self) -> None:
        super().__init__(drop_layers())
        self.before = nn.BatchNorm1d(6, affine=False)
        self.steps = 0
        self.evaluations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        x, y = batch
        white = self.before(x)
        return super().training_step((white, y), batch_idx) + 0 * white.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluations += 1
        super().validation_step((self.before(batch[0]), batch[1]), batch_idx)


def loader() -> DataLoader[Any]:
    return DataLoader(Dense(SAMPLES), batch_size=BATCH)


def fitted(strategy: Any, devices: int = 1) -> Whitened:
    pl.seed_everything(3)
    net = Whitened()
    trainer = pl.Trainer(
        **QUIET, devices=devices, max_epochs=1, num_sanity_val_steps=0, strategy=strategy
    )
    trainer.fit(net, loader(), loader())
    return net


def normalised(parts: int) -> nn.BatchNorm1d:
    """The norm after the same batches by hand, each cut as torch.tensor_split does."""
    norm = nn.BatchNorm1d(6, affine=False)
    for x, _ in loader():
        for part in torch.tensor_split(x, parts):
            norm(part)
    return norm


@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_each_microbatch_runs_once(batch_norm: Any) -> None:
    net = fitted(
        SynchronousPipelineStrategy(
            microbatches=PARTS, batch_norm=batch_norm, config="1", cuts=[], timeout_s=60
        )
    )
    assert (net.steps, net.evaluations) == (PARTS * STEPS, STEPS)
    expected = normalised(PARTS if batch_norm == "microbatch" else 1)
    for name, value in expected.named_buffers():
        torch.testing.assert_close(net.before.get_buffer(name), value)


@pytest.mark.parametrize("strategy", [PipelineStrategy, SynchronousPipelineStrategy])
def test_each_minibatch_of_any_pipeline_runs_once(strategy: Any) -> None:
    whole = {} if strategy is PipelineStrategy else {"microbatches": 1}
    net = fitted(strategy(keyed_randomness=True, config="1", cuts=[], **whole))
    assert (net.steps, net.evaluations) == (STEPS, STEPS)
    for name, value in normalised(1).named_buffers():
        torch.testing.assert_close(net.before.get_buffer(name), value)


def in_stages(rank: int) -> None:
    strategy = SynchronousPipelineStrategy(
        microbatches=PARTS, batch_norm="deferred", config="1-1", cuts=[4], timeout_s=60
    )
    fitted(strategy, devices=2)


@pytest.mark.full
def test_norms_before_the_layers_of_several_stages_are_refused_where_they_would_move_once() -> None:
    first, last = outcomes(in_stages, 2, limit_s=60)
    assert isinstance(first.error, ConfigError)
    assert "before (BatchNorm1d) runs before the layers" in first.error.message
    assert "first entry of the Sequential" in first.error.remedy
    assert last.error is not None
