"""Checkpoints of domains over ranks are whole, and one process or other ranks go on from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from sparsepipe.runs.checkpoints import load_weights
from sparsepipe.strategies.domain import OwnDomains
from tests.support.domain_cases import (
    STEPS,
    Case,
    Data,
    gap,
    placement_of,
    plain,
    strategy_of,
    trainer_of,
)
from tests.support.processes import run_shared

BOUND = 1e-12
HALF = STEPS // 2


def trained(
    rank: int, case: Case, directory: Path, steps: int = HALF, resumed: Path | None = None
) -> dict[str, Any]:
    """A training up to a step, with a checkpoint at its end."""
    saves = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = case.module()
    trainer = trainer_of(
        case,
        strategy=strategy_of(case),
        ranks=case.ranks,
        max_steps=steps,
        callbacks=[saves],
        enable_checkpointing=True,
    )
    # Lightning's loaders begin anew where a training goes on within an epoch.
    data = Data(case, first=0 if resumed is None else HALF)
    trainer.fit(module, data, ckpt_path=resumed)
    return dict(module.state_dict())


def test_parts_have_room_again_after_a_move() -> None:
    """A device's buffers are other tensors than those that were freed."""
    case = Case(targets=2, ranks=3)
    module = case.module()
    for layer in list(module.modules()):
        layer.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    part = OwnDomains(module, placement_of(case), 1, 1)
    part.prune()
    module._apply(torch.clone)
    freed = {name for name, value in module.state_dict().items() if value.shape != shapes[name]}
    assert freed == {name for name in shapes if not part.holds(name)}
    part.unprune()
    assert {name: value.shape for name, value in module.state_dict().items()} == shapes


CASES = [
    Case(targets=2, ranks=3),
    pytest.param(Case(targets=2, ranks=2), marks=pytest.mark.full),
    pytest.param(Case(targets=1, ranks=4), marks=pytest.mark.full),
    Case(targets=2, ranks=4, roles="separate"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_others_go_on_from_them(case: Case, tmp_path: Path) -> None:
    expected, _ = plain(case)
    run_shared(trained, case.ranks, case, tmp_path / "first")
    path = tmp_path / "first" / f"step={HALF}.ckpt"
    saved = torch.load(path, weights_only=False)
    assert saved["state_dict"].keys() == expected.keys()
    assert not any(value.isnan().any() for value in saved["state_dict"].values())
    states = saved["optimizer_states"][0]["state"]
    assert len(states) == len(list(case.module().parameters()))
    alone = replace(case, ranks=1, roles="equal")
    on_one = trained(0, alone, tmp_path / "alone", STEPS, path)
    others = replace(case, ranks=3, roles="equal")
    on_others = run_shared(trained, 3, others, tmp_path / "others", STEPS, path)
    for found in (on_one, *on_others):
        errors = gap(found, expected)
        assert max(errors.values()) <= BOUND, errors


def test_private_encoders_come_back_bit_for_bit(tmp_path: Path) -> None:
    case = Case(targets=2, ranks=3)
    found = run_shared(trained, 3, case, tmp_path)
    path = tmp_path / f"step={HALF}.ckpt"
    saved = torch.load(path, weights_only=False)["state_dict"]
    module = case.module()
    load_weights(module, saved, path)
    for name, value in module.state_dict().items():
        assert torch.equal(value, saved[name])
        assert all(torch.equal(value, state[name]) for state in found), name


@pytest.mark.parametrize("norm", ["domain", "none"])
def test_a_domain_is_added_to_a_trained_network(tmp_path: Path, norm: str) -> None:
    before = Case(targets=1, ranks=2, norm=norm)
    old = run_shared(trained, 2, before, tmp_path)[0]
    after = Case(targets=2, ranks=3, norm=norm)
    module = after.module()
    fresh = {name: value.clone() for name, value in module.state_dict().items()}
    load_weights(module, old, tmp_path / "old.ckpt")
    parts = module.parts_of_domains
    for name, value in module.state_dict().items():
        if parts.get(name) == "scan_1":
            assert torch.equal(value, fresh[name]), "the new encoder begins as it is drawn"
        elif value.shape == old[name].shape:
            assert torch.equal(value, old[name])
        else:
            assert name.startswith("network.discriminator.2.")
            assert torch.equal(value[:2], old[name])
            assert torch.equal(value[2], fresh[name][2])
    trainer = trainer_of(Case(targets=2, ranks=1, norm=norm), strategy="auto")
    trainer.fit(module, Data(after))
    assert not any(value.isnan().any() for value in module.state_dict().values())
    smaller = before.module()
    load_weights(smaller, module.state_dict(), tmp_path / "new.ckpt")
    assert all(
        torch.equal(value, module.state_dict()[name])
        for name, value in smaller.state_dict().items()
        if not name.startswith("network.discriminator.2.")
    )
