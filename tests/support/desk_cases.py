"""The configuration of Table II at scale desk, by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

DESK = {
    "data.num_points": 4096,
    "data.source._target_": "sparsepipe.data.sources.GeneratedShapes",
    "data.source.train_per_class": 200,
    "data.source.test_per_class": 52,
    "data.num_workers": None,
    "data.seed": 0,
    "model.width": 0.25,
    "model.dropout": 0.2,
    "optim.optimizer._target_": "torch.optim.SGD",
    "optim.optimizer.lr": 0.03,
    "optim.schedule._target_": "sparsepipe.models.LRSchedule",
    "optim.schedule.factory._target_": "torch.optim.lr_scheduler.OneCycleLR",
    "trainer.max_epochs": 4,
    "trainer.limit_train_batches": None,
    "trainer.limit_test_batches": None,
    "trainer.precision": "32-true",
}
"""As scale=desk composes, but for what follows from other keys."""
ADAMW = {
    "optim.optimizer._target_": "torch.optim.AdamW",
    "optim.optimizer.lr": 1e-3,
    "optim.schedule.factory._target_": "torch.optim.lr_scheduler.CosineAnnealingLR",
}
MADE = {"data.source.test_per_class": 52}
"""What trainings made by hand lack of it."""


def as_desk(overrides: Sequence[str], keys: Sequence[str]) -> Mapping[str, Any]:
    """Stands for the composing of a command of Table II."""
    assert overrides[0] == "experiment=table2"
    assert "scale=desk" in overrides
    given = dict(word.split("=", 1) for word in overrides)
    share = given.get("paper/network", "").partition("_p")[2]
    values = {
        **DESK,
        "data.batch_size": 4 if given.get("paper/trial") == "four_devices" else 16,
        "data.point_ratio": int(share) / 100 if share else 1.0,
        "task.budget_bytes": 2.75e9,
        "task.steps": 2,
        "hydra.runtime.choices.optim": given.get("optim", "sgd_onecycle"),
        **(ADAMW if given.get("optim") == "adamw" else {}),
    }
    values |= {key: told(text) for key, text in given.items() if "." in key}
    values["optim.schedule.factory.max_lr"] = values["optim.optimizer.lr"]
    if given.get("optim.schedule") == "null":
        values = {key: value for key, value in values.items() if "schedule" not in key}
    return {key: values.get(key) or below(values, key) for key in keys}


def below(values: Mapping[str, Any], group: str) -> Any:
    """A falsy value, or what a group has."""
    found = {key: value for key, value in values.items() if key.startswith(f"{group}.")}
    return found or values.get(group)


def told(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
