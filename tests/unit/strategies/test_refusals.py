"""What a pipeline cannot do is refused with a remedy, on every rank, before it trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as lightning
from pytorch_lightning.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sparsepipe.errors import ConfigError, PlanError, TransportError
from sparsepipe.schedule import Plan
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from sparsepipe.strategies.pipeline.refusals import check_module, check_trainer
from sparsepipe.strategies.pipeline.stage_plan import StagePlacement, find_layers
from sparsepipe.strategies.sharding import ShardedOptimizer
from tests.support.pipeline_cases import (
    QUIET,
    Net,
    dense_layers,
    image_layers,
    make_loader,
    make_net,
    plain_trainer,
)
from tests.support.processes import outcomes, run, run_shared


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.automatic_optimization = False


class Hooked(Net):
    """Has hooks of gradients, which no backward of a pipeline would call rightly."""

    def __init__(self, *, after: bool = False) -> None:
        super().__init__(dense_layers())
        for parameter in self.parameters():
            if after:
                parameter.register_post_accumulate_grad_hook(lambda parameter: None)
            else:
                parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))


class Tied(Net):
    def __init__(self) -> None:
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        second.weight = first.weight
        super().__init__(nn.Sequential(first, nn.ReLU(), second))


class StepwisePlateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        config = {"scheduler": plateau, "interval": "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Nothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.layers(batch[0])


class Ambiguous(Net):
    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.head, self.tail, self.layers = nn.Sequential(), nn.Sequential(), None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_loader("dense", batches=2).dataset)


@dataclass(frozen=True)
class Refusal:
    message: str
    strategy: Callable[[], dict[str, Any]] = dict
    trainer: Callable[[], dict[str, Any]] = dict
    module: Callable[[], pl.LightningModule] = lambda: make_net("dense")
    loader: Callable[[], Any] = lambda: make_loader("dense", batches=3)


REFUSALS = {
    "accumulation": Refusal(
        "accumulate_grad_batches=2", trainer=lambda: {"accumulate_grad_batches": 2}
    ),
    "by hand": Refusal("optimizes by hand", module=ByHand),
    "hooks": Refusal("has a hook for its gradient", module=Hooked),
    "accumulation hooks": Refusal("has a hook for its gradient", module=lambda: Hooked(after=True)),
    "tied": Refusal("are the same parameter", module=Tied, strategy=lambda: {"cuts": [1]}),
    "plateau": Refusal(
        "ReduceLROnPlateau checks a metric, 'loss', after each step",
        module=lambda: StepwisePlateau(dense_layers()),
    ),
    "stream": Refusal("has no length", loader=lambda: DataLoader(Stream(), batch_size=4)),
    "no loss": Refusal("training_step returned NoneType", module=lambda: Nothing(dense_layers())),
    "cuts": Refusal("do not split 7 layers", strategy=lambda: {"cuts": [9]}),
    "config": Refusal("needs devices=3", strategy=lambda: {"config": "2-1"}),
    "words": Refusal("does not say", strategy=lambda: {"config": "two"}),
    "spectrain": Refusal(
        "the optimizer is Adam",
        strategy=lambda: {"mode": "spectrain"},
        module=lambda: make_net("dense", optimizer="adam"),
    ),
    "layers": Refusal(
        "no nn.Sequential that is called 'network'", strategy=lambda: {"layers": "network"}
    ),
    "ambiguous": Refusal("several nn.Sequential", module=Ambiguous),
    "sync norm": Refusal("sync_batchnorm=true", trainer=lambda: {"sync_batchnorm": True}),
}


def refused(rank: int, name: str) -> None:
    case = REFUSALS[name]
    strategy = PipelineStrategy(**{"timeout_s": 60, "balance": "parameters", **case.strategy()})
    options = {**QUIET, "devices": 2, "max_epochs": 1, "strategy": strategy, **case.trainer()}
    trainer = pl.Trainer(**options)
    trainer.fit(case.module(), case.loader(), make_loader("dense", batches=1))


def error_of(rank: int, name: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        refused(rank, name)
    return caught.value


@pytest.mark.parametrize("name", [name for name in REFUSALS if name != "no loss"])
def test_refused_on_all_ranks(name: str) -> None:
    for error in run_shared(error_of, 2, name):
        assert REFUSALS[name].message in error.message
        assert error.remedy


def test_refused_when_one_rank_sees_it() -> None:
    """The last stage, in a step; the other loses its peer."""
    ends = outcomes(refused, 2, "no loss", limit_s=60)
    (error,) = (end.error for end in ends if isinstance(end.error, ConfigError))
    assert REFUSALS["no loss"].message in error.message
    assert error.remedy


def half() -> pl.Trainer:
    # Lightning has a scaler for CUDA only.
    scaler = torch.amp.GradScaler("cpu")
    return plain_trainer(plugins=[pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)])


def calling(callback: pl.Callback) -> Callable[[], pl.Trainer]:
    return lambda: plain_trainer(callbacks=[callback], enable_checkpointing=True)


TRAINERS: dict[str, Callable[[], pl.Trainer]] = {
    "scales the loss": half,
    "val_check_interval is a time": lambda: plain_trainer(val_check_interval="00:00:01:00"),
    "ModelCheckpoint(train_time_interval=...) is a time": calling(
        lightning.ModelCheckpoint(train_time_interval=timedelta(minutes=1))
    ),
    "ModelCheckpoint(save_on_exception=True)": calling(
        lightning.ModelCheckpoint(save_on_exception=True)
    ),
    "OnExceptionCheckpoint saves when a rank fails": calling(
        lightning.OnExceptionCheckpoint("somewhere")
    ),
    "GradientAccumulationScheduler accumulates": calling(
        lightning.GradientAccumulationScheduler({4: 2})
    ),
    "BackboneFinetuning changes what is trained": calling(lightning.BackboneFinetuning()),
    "ModelPruning prunes the whole network": calling(lightning.ModelPruning("l1_unstructured")),
    "StochasticWeightAveraging averages": calling(lightning.StochasticWeightAveraging(0.1)),
    "WeightAveraging averages": calling(lightning.WeightAveraging()),
}


class OwnBackward(Net):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


MODULES: dict[str, Callable[[], Any]] = {
    "OwnBackward has a backward of its own": lambda: OwnBackward(dense_layers()),
    "Net is compiled as a whole": lambda: from_compiled(torch.compile(make_net("dense"))),
    "has no shape yet": lambda: Net(nn.Sequential(nn.LazyLinear(3), nn.ReLU())),
}


@pytest.mark.parametrize("message", [*TRAINERS, *MODULES])
def test_refused_trainers_and_modules(message: str) -> None:
    made: Any = {**TRAINERS, **MODULES}[message]()
    check = partial(check_module, fitting=True)
    if message in TRAINERS:
        check = partial(check_trainer, synchronises_norm=False)
    with pytest.raises(ConfigError) as refused:
        check(made)
    assert message in refused.value.message
    assert refused.value.remedy


class Lookahead(torch.optim.SGD):
    """Keeps slow weights in a list, in a helper's, or by parameter."""

    def __init__(self, parameters: Any, keeps: str) -> None:
        super().__init__(parameters, lr=0.1)
        every = self.param_groups[0]["params"]
        slow = [parameter.detach().clone() for parameter in every]
        if keeps == "state":
            self.state.update({p: {"slow": copy} for p, copy in zip(every, slow, strict=True)})
        elif keeps == "group":
            self.param_groups[0]["slow"] = slow
        else:
            self.helper = SimpleNamespace(slow=[slow]) if keeps == "helper" else tuple(slow)


@pytest.mark.parametrize("keeps", ["list", "helper", "group", "state"])
def test_an_optimizer_that_pairs_by_place_is_refused(keeps: str) -> None:
    optimizer = Lookahead(make_net("dense").parameters(), keeps)
    owned = [id(parameter) for parameter in optimizer.param_groups[0]["params"][3:]]
    if keeps == "state":
        ShardedOptimizer(optimizer, owned=owned)
        return
    with pytest.raises(ConfigError, match="Lookahead keeps tensors for its parameters in a list"):
        ShardedOptimizer(optimizer, owned=owned)


def test_an_optimizer_that_couples_its_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS evaluates the whole network"):
        ShardedOptimizer(torch.optim.LBFGS(make_net("dense").parameters()), owned=[])


def test_evaluation_accepts_settings_refused_in_training() -> None:
    check_module(OwnBackward(dense_layers()), fitting=False)
    check_module(ByHand(), fitting=False)


def test_more_stages_than_layers() -> None:
    from sparsepipe.strategies.pipeline.stage_plan import make_plan

    with pytest.raises(ConfigError, match="3 stages, more than the number of layers, 2"):
        make_plan((1, 1, 1), cuts=None, costs=lambda: [1.0, 1.0], num_layers=2)


class Residual(nn.Sequential):
    """Not what a pipeline would run: its layers one by one."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Named(nn.Sequential):
    """The same as its parent, under another name."""


def holding(layers: nn.Module) -> nn.Module:
    module = nn.Module()
    module.layers = layers
    return module


@pytest.mark.parametrize("name", [None, "layers"])
def test_a_sequential_with_a_forward_of_its_own(name: str | None) -> None:
    entries = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="layers is a Residual with a forward of its own") as no:
        find_layers(holding(Residual(*entries)), name)
    assert "entry of the Sequential" in no.value.remedy
    replaced = nn.Sequential(*entries)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="of its own"):
        find_layers(holding(replaced), name)
    for layers in (nn.Sequential(*entries), Named(*entries), Named(Residual(*entries))):
        assert find_layers(holding(layers), name) == "layers"


class Shifted(nn.Module):
    def __init__(self, shift: Any) -> None:
        super().__init__()
        if isinstance(shift, nn.Parameter):
            self.shift = shift
        else:
            self.register_buffer("shift", shift)


@pytest.mark.parametrize(("kind", "word"), [(torch.Tensor, "buffer"), (nn.Parameter, "parameter")])
def test_what_two_stages_would_share(kind: Any, word: str) -> None:
    shared = kind(torch.ones(2))
    module = holding(nn.Sequential(Shifted(shared), Shifted(shared), Shifted(kind(torch.ones(2)))))

    def check(cut: int) -> None:
        plan = Plan.of(config="1-1", cuts=[cut], num_layers=3)
        StagePlacement(module=module, name="layers", layers=module.layers, plan=plan).check()

    check(2)
    with pytest.raises(ConfigError) as refused:
        check(1)
    assert refused.value.message == (
        f"layers.0.shift (stage 0) and layers.1.shift (stage 1) are the same {word}"
    )


@pytest.mark.parametrize(
    ("grids", "error", "text"),
    [
        ([None], PlanError, "number of grids is 1, but that of stages is 2"),
        ([None, [1, 1]], PlanError, "stage 1, 1 in all, cannot form a grid of 1 x 1"),
        ([None, [0, 2]], PlanError, "cannot form a grid of 0 x 2"),
    ],
)
def test_grids_that_fit_no_plan_are_refused(grids: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Plan.of(config="1-1", cuts=[2], num_layers=4, grids=grids)
    with pytest.raises(PlanError, match="4 in all, cannot form a grid of 1 x 2"):
        Plan.of(config="1-2", cuts=[2], num_layers=4, grids=[None, [1, 2]])


def test_a_plan_with_grids_is_read_back() -> None:
    plan = Plan.of(config="1-1-2", cuts=[2, 5], num_layers=9, grids=[None, [2, 2], None])
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.num_ranks == 7
    assert [plan.stage_of(rank) for rank in range(7)] == [0, 1, 1, 1, 1, 2, 2]
    assert [plan.leader_of(rank) for rank in range(7)] == [0, 1, 1, 1, 1, 5, 6]
    assert [plan.warmup(stage) for stage in range(3)] == [3, 2, 0]


class Headed(Net):
    """With a layer behind the layers."""

    def __init__(self) -> None:
        super().__init__(image_layers())
        self.head = torch.nn.Linear(4, 4)


def refused_on_grids(rank: int, kind: str) -> str:
    options: dict[str, Any] = {"config": "1-1", "cuts": [4], "grids": [None, [1, 2]]}
    net, strategy = make_net("image"), PipelineStrategy
    if kind == "head":
        net = Headed()
    elif kind == "rule":
        net.layers[4] = torch.nn.Sequential(torch.nn.LocalResponseNorm(2))
    elif kind == "one stage":
        options.update(config="1", cuts=[], grids=[[3, 1]])
    elif kind == "devices":
        options["grids"] = [[1, 2], [1, 2]]
    elif kind == "dimensions":
        options.update(cuts=[9])
    elif kind == "recompute":
        strategy, options["recompute"] = SynchronousPipelineStrategy, "all"
    elif kind == "norms":
        strategy, options["batch_norm"] = SynchronousPipelineStrategy, "deferred"
    trainer = pl.Trainer(
        **QUIET, max_steps=2, devices=3, strategy=strategy(**options, timeout_s=20)
    )
    with pytest.raises((ConfigError, TransportError)) as caught:
        trainer.fit(net, make_loader("image", batches=2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("head", "head.weight is trained outside of the layers"),
        ("rule", r"LocalResponseNorm\) has no rule"),
        ("one stage", "the devices of the only stage form a grid"),
        ("devices", "needs devices=4, but the Trainer has 3"),
        ("dimensions", "no tensor with 2 dimensions after batch and channel"),
        ("recompute", "selects layers of stage 1, but its devices form a grid"),
        ("norms", "cannot be used where devices form a grid"),
    ],
)
def test_what_a_grid_cannot_do_is_refused(kind: str, text: str) -> None:
    # A refusal in a step leaves messages behind.
    messages = (run if kind == "dimensions" else run_shared)(refused_on_grids, 3, kind)
    found = [message for message in messages if re.search(text, message)]
    assert len(found) == (2 if kind == "dimensions" else 3), messages
