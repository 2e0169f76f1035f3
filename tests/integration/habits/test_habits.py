"""Each row of the table, against a plain Trainer."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsepipe.errors import ConfigError
from tests.integration.habits.habit import equal, trained
from tests.integration.habits.table import HABITS, table
from tests.support.processes import outcomes, run_shared

OF_LIGHTNING = (MisconfigurationException, ValueError, RuntimeError)
PAGE = Path(__file__).parents[3] / "docs/pipeline.md"


def on_a_rank(rank: int, name: str, kind: str) -> Any:
    """A training's outcome, what was warned of, and the steps that optimizers made."""
    steps: list[Any] = []
    counting = register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(optimizer))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome: Any = trained(HABITS[name], kind)
        except (ConfigError, *OF_LIGHTNING) as error:
            outcome = error
        finally:
            counting.remove()
    return outcome, [str(warning.message) for warning in caught], len(steps)


@functools.cache
def plainly(name: str) -> dict[str, Any]:
    """In this process, on one thread as ranks are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trained(HABITS[name], "plain")
    torch.set_num_threads(before)
    return found


def named(*verdicts: str, early: bool | None = None, synchronous: bool = False) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.full) if habit.slow else name
        for name, habit in HABITS.items()
        if habit.verdict in verdicts
        and (early is None or habit.early is early)
        and (habit.synchronous or not synchronous)
    ]


@pytest.mark.parametrize("name", named("same"))
def test_same(name: str) -> None:
    for outcome, texts, steps in run_shared(on_a_rank, 2, name, "asynchronous"):
        assert steps
        assert not any("zero_grad goes through" in text for text in texts)
        assert equal(outcome, plainly(name), exactly=True)


@pytest.mark.parametrize("name", named("same", "different", synchronous=True))
def test_same_in_a_synchronous_pipeline(name: str) -> None:
    for outcome, _, _ in run_shared(on_a_rank, 2, name, "synchronous"):
        assert equal(outcome, plainly(name), exactly=False)


@pytest.mark.parametrize("name", named("different"))
def test_different(name: str) -> None:
    habit = HABITS[name]
    assert habit.differs is not None
    ranks = run_shared(on_a_rank, 2, name, "asynchronous")
    assert habit.differs(plainly(name)["seen"], [outcome["seen"] for outcome, _, _ in ranks])
    if habit.warns:
        told = [[text for text in texts if habit.warns in text] for _, texts, _ in ranks]
        assert [len(texts) for texts in told] == [1, 0]


@pytest.mark.parametrize("name", named("refused", early=True))
def test_refused_before_the_first_step(name: str) -> None:
    for error, _, steps in run_shared(on_a_rank, 2, name, "asynchronous"):
        assert not steps
        assert HABITS[name].message in str(error)
        assert isinstance(error, OF_LIGHTNING) or error.remedy


def refused_in_a_run(rank: int, name: str, kind: str) -> None:
    trained(HABITS[name], kind)


KINDS = [
    (name, kind)
    for name in named("refused", early=False)
    for kind in ("asynchronous", "synchronous")
    if kind == "asynchronous" or (HABITS[name].synchronous and HABITS[name].drained)
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if kind == "asynchronous" else [pytest.mark.full])
        for name, kind in KINDS
    ],
)
def test_refused_when_it_happens(name: str, kind: str) -> None:
    """One rank sees it, or all do; the run ends on all of them, before an update counts."""
    ends = outcomes(refused_in_a_run, 2, name, kind, limit_s=60)
    assert all(end.error is not None for end in ends)
    errors = [end.error for end in ends if isinstance(end.error, ConfigError)]
    assert errors
    for error in errors:
        assert HABITS[name].message in error.message
        assert error.remedy


def test_the_page_has_the_table() -> None:
    """Print it anew by: python -m tests.integration.habits."""
    assert len(HABITS) >= 60
    assert table().strip() in PAGE.read_text(encoding="utf-8")
