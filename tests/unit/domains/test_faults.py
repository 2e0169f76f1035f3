"""Ranks of domains that fail, and what is refused before the first step."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.domains import exchange
from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.runtime.collectives import replicas
from sparsepipe.strategies import DomainStrategy
from sparsepipe.strategies.domain import check_trainer
from tests.support.domain_cases import Case, Data, trainer_of
from tests.support.processes import outcomes, run_shared

TIMEOUT_S = 5.0
FAILING, CALL = 1, 5
PLACES: dict[str, tuple[Any, str]] = {
    "codes": (exchange, "start_messages"),
    "sizes": (exchange, "gather_numbers"),
    "norms": (exchange, "added_up"),
    "gradients": (replicas.Replicas, "average"),
}
"""Where a rank fails: in which call."""


def without_one(rank: int, case: Case, place: str, signum: int) -> tuple[str, float]:
    """A training in which a rank fails; the error of another one, and how long it took."""
    owner, name = PLACES[place]
    function, calls = getattr(owner, name), iter(range(10_000))

    def acting(*arguments: Any, **more: Any) -> Any:
        if next(calls) == CALL and rank == FAILING:
            os.kill(os.getpid(), signum)
        return function(*arguments, **more)

    setattr(owner, name, acting)
    strategy = DomainStrategy(roles=case.roles, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    trainer = trainer_of(case, strategy=strategy, ranks=case.ranks, num_sanity_val_steps=0)
    began_s = time.monotonic()
    try:
        trainer.fit(case.module(), Data(case))
    except TransportError as error:
        return str(error), time.monotonic() - began_s
    return "", 0.0


@pytest.mark.parametrize(
    ("place", "roles", "signum"),
    [
        ("codes", "equal", signal.SIGKILL),
        ("norms", "equal", signal.SIGKILL),
        ("codes", "separate", signal.SIGKILL),
        pytest.param("sizes", "equal", signal.SIGKILL, marks=pytest.mark.full),
        pytest.param("gradients", "equal", signal.SIGKILL, marks=pytest.mark.full),
        pytest.param("gradients", "separate", signal.SIGKILL, marks=pytest.mark.full),
        pytest.param("codes", "equal", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("codes", "separate", signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_the_others_end_and_name_it(place: str, roles: str, signum: int) -> None:
    case = Case(targets=2 - (roles == "separate"), ranks=3, roles=roles, norm="all")
    found = outcomes(
        without_one, 3, case, place, signum, awaited=[0, 2], join_group=False, limit_s=120.0
    )
    for rank in (0, 2):
        error, took_s = found[rank].value
        assert "rank 1" in error, error
        assert took_s < 4 * TIMEOUT_S + 20


class Plain(pl.LightningModule):
    """Knows nothing of domains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("it is refused before")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def refusal(rank: int, case: Case, what: str) -> str:
    """The error of a training that there cannot be."""
    settings: dict[str, Any] = {"sync_batchnorm": {"sync_batchnorm": True}}.get(what, {})
    module: pl.LightningModule = Plain() if what == "no domains" else case.module()
    if what == "two optimizers":
        one, module.automatic_optimization = module.configure_optimizers, False
        module.configure_optimizers = lambda: [one(), one()]  # type: ignore[method-assign]
    if what == "lengths" and rank:
        settings = {"limit_train_batches": 3}
    try:
        strategy = DomainStrategy(timeout_s=TIMEOUT_S)
        trainer = trainer_of(case, strategy=strategy, ranks=case.ranks, **settings)
        trainer.fit(module, Data(case))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("no domains", "Plain has no attribute 'domains'"),
        ("sync_batchnorm", "sync_batchnorm"),
        ("two optimizers", "2 optimizers"),
        ("lengths", "loaders have 8, 3 batches"),
    ],
)
def test_refusals(what: str, word: str) -> None:
    for error in run_shared(refusal, 2, Case(), what):
        assert word in error, error


def test_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="16-mixed"):  # which Lightning has on GPUs only
        check_trainer(SimpleNamespace(precision="16-mixed"), synchronises_norm=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="roles"):
        DomainStrategy(roles="moon")  # type: ignore[arg-type]


def test_labels_of_targets_reach_no_loss() -> None:
    """Whatever they are, they change nothing; the source's do."""
    case = Case(targets=2)

    def objective(changed: str | None) -> float:
        module = case.module()
        batch = {name: case.batch(name, 0, 0, 1) for name in case.domains}
        if changed is not None:
            batch[changed]["label"] = (batch[changed]["label"] + 1) % 3
        return float(module.exchange.losses(module, batch).objective)

    assert objective("scan_0") == objective("scan_1") == objective(None)
    assert objective("cad") != objective(None)


def test_a_batch_of_a_strange_domain_is_refused() -> None:
    case = Case(targets=2)
    batch = {name: case.batch(name, 0, 0, 1) for name in case.domains}
    module = Case(targets=1).module()
    with pytest.raises(ConfigError, match="'scan_1'"):
        module.exchange.losses(module, batch)
