"""Labels of targets: no weight depends on them, and they may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.domain_cases import Case, parallel, plain
from tests.support.processes import run_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Relabelled(Case):
    """A training in which the labels of targets are others, or missing.

    Attributes:
        labels: own, permuted or none.
    """

    labels: str = "own"

    def batch(self, name: str, step: int, replica: int, replicas: int) -> dict[str, Any]:
        batch = Case.batch(self, name, step, replica, replicas)
        if name != self.domains[0] and self.labels != "own":
            label_B = batch["label"]
            batch["label"] = torch.full_like(label_B, -1) if self.labels == "none" else 2 - label_B
        return batch


@pytest.mark.parametrize("similarity", ["dann", pytest.param("mmd", marks=pytest.mark.full)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_weight_depends_on_labels_of_targets(ranks: int, similarity: str) -> None:
    found = {}
    for labels in ("own", "permuted", "none"):
        case = Relabelled(targets=2, ranks=ranks, similarity=similarity, labels=labels)
        found[labels] = plain(case) if ranks == 1 else run_shared(parallel, ranks, case, {})[0]
    (state, logged), (permuted, others), (unlabelled, fewer) = found.values()
    for each in (permuted, unlabelled):
        assert each.keys() == state.keys()
        assert all(torch.equal(each[name], value) for name, value in state.items())
    for name, value in logged.items():
        is_of_labels = "accuracy" in name or name.endswith("/loss")
        if name.startswith("val/") and is_of_labels and ("scan" in name or "target" in name):
            assert name not in fewer, "what cannot be known is not logged"
        else:
            assert fewer[name] == others[name] == value
    assert {"val/scan_0/accuracy", "val/target_accuracy"} <= logged.keys() - fewer.keys()
    assert others["val/scan_0/loss"] != logged["val/scan_0/loss"], "evaluations use them"


def test_accuracy_is_that_of_samples_with_labels() -> None:
    module = Case(targets=1).module()
    batch = Case().batch("scan_0", 3, 0, 1)
    logged: dict[str, float] = {}
    module.log = lambda name, value, **more: logged.update({name: float(value)})  # type: ignore[method-assign]
    module.eval()
    right = module(batch["input"], "scan_0").argmax(1)
    label_B = torch.where(torch.arange(len(right)) % 2 == 0, right, -1)
    with torch.no_grad():
        module.test_step({**batch, "label": label_B, "domain": "scan_0"}, 0)
    module.on_test_epoch_end()
    assert logged["test/scan_0/accuracy"] == 1
    assert int(module.test_confusions["scan_0"].sum()) == 3
