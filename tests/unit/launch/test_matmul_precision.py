"""How precisely a run multiplies: resolved once, the same in all its processes, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe.profiling import Profile
from sparsepipe.report.measurements import MeasuringPlace, plain_rows, unlike_notes
from sparsepipe.report.tables import of_training
from sparsepipe.runs.model import Model
from sparsepipe.utils.files import read_json
from sparsepipe.utils.process import matmul_precision_on, multiplying, set_matmul_precision

KEY = "trainer.matmul_precision"
NOTING = ("model._target_=tests.support.tinyhouse.noting_mlp", "hardware.accelerator=cpu")
RANKS = ("parallel=dp", "parallel.devices=2", "hardware.cpu_devices=2")
PROFILE = ("task=profile", "task.num_warmup=1", "task.num_measured=1")
FIT = ("task=fit_batch", "task.budget_bytes=1e9", "task.most=1")
older = torch.get_float32_matmul_precision


def test_products_and_convolutions_have_the_same() -> None:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    for precision, product in {"high": "tf32", "medium": "tf32", "highest": "ieee"}.items():
        set_matmul_precision(matmul_precision_on("cuda", precision))
        with multiplying("high"):
            assert cudnn.fp32_precision == "tf32"
        assert (cuda.fp32_precision, older()) == (product, precision)
        assert (cudnn.fp32_precision == "tf32") == (product == "tf32")
    cuda.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):  # the older names, which Lightning reads
        older()
    with multiplying("highest"):
        assert cuda.fp32_precision == "tf32"
    assert matmul_precision_on("cuda", None) == "high"
    set_matmul_precision(matmul_precision_on("cpu", None))
    assert older() == "highest"


@pytest.mark.parametrize(
    "words",
    [("parallel=single",), RANKS, PROFILE, pytest.param(FIT, marks=pytest.mark.full)],
    ids=["train", "ranks", "profile", "fit_batch"],
)
@pytest.mark.usefixtures("networks_for_ranks")
def test_every_process_of_a_run_has_it(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MULTIPLYING", str(Path("notes").absolute()))

    def check(precision: str, *overrides: str) -> Path:
        Path("notes").unlink(missing_ok=True)
        path, lines = job(*NOTING, *overrides), Path("notes").read_text().splitlines()
        assert len({line.partition(" ")[0] for line in lines}) == 1 + (words is RANKS)
        expected = f"{precision} {precision != 'highest'}"
        assert {line.partition(" ")[2] for line in lines} == {expected}
        assert read_json(path / "result.json")["matmul_precision"] == precision
        return path

    path = check("medium", *words, f"{KEY}=medium")
    if words == ("parallel=single",):
        measured = ("task=evaluate", f"checkpoint={path}")
        check("medium", *measured)
        other = read_json(check("highest", *measured, f"{KEY}=highest") / "result.json")
        assert other["differs_from_training"] == f"{KEY}=highest (trained with medium)"
    if words is PROFILE:
        assert Profile.load(path / "profile.json").meta["matmul_precision"] == "medium"
        assert check("high", *words, f"{KEY}=high") != path


@dataclass
class Samples:
    """A preprocessing that finds points where they are wanted."""

    device: Any = None
    dtype: Any = None
    batch = staticmethod(lambda samples: {"input": torch.zeros(len(samples), 8)})


def test_a_loaded_model_predicts_with_the_training_s() -> None:
    network, said = nn.Linear(8, 2), []
    network.register_forward_hook(lambda *_: said.append(older()))
    for chosen in (None, "medium"):
        Model(network, ["a", "b"], Samples(), matmul_precision=chosen).predict_samples([{}])  # type: ignore[arg-type]
    assert said == ["highest", "medium"]
    assert torch.backends.cudnn.allow_tf32, "the process is the user's"


def test_means_over_unlike_precisions_are_noted() -> None:
    cases: Any = (
        ("cuda", {"matmul_precision": "high"}, {"matmul_precision": "medium"}, True),
        ("cuda", {"matmul_precision": "high"}, {}, True),
        ("cpu", {KEY: "highest", "matmul_precision": "highest"}, {}, False),
    )
    for accelerator, one, other, noted in cases:
        own = {"hardware_devices": "1 x a device", "hardware_accelerator": accelerator}
        rows = plain_rows({**own, **x, "seed": n, "run_id": n} for n, x in enumerate((one, other)))
        words = "runs 0, 1 differ in matmul_precision: the mean is over all"
        assert unlike_notes(rows, of_training) == [words] * noted
        assert len({MeasuringPlace.of(row).hardware for row in rows}) == 1 + noted
