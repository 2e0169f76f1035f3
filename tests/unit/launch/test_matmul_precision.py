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
from tests.support.tinyhouse import Multiplying

KEY = "trainer.matmul_precision"
NOTING = ("model._target_=tests.support.tinyhouse.noting_mlp", "hardware.accelerator=cpu")
PROFILE = ("task=profile", "task.num_warmup=1", "task.num_measured=1")
FIT = ("task=fit_batch", "task.budget_bytes=1e9", "task.most=1")


def test_products_and_convolutions_have_the_same() -> None:
    backends, older = torch.backends, torch.get_float32_matmul_precision
    for precision, product in {"high": "tf32", "medium": "tf32", "highest": "ieee"}.items():
        assert matmul_precision_on("cuda", precision) == precision
        set_matmul_precision(precision)
        with multiplying("high"):
            assert backends.cudnn.conv.fp32_precision == "tf32"
        assert (backends.cuda.matmul.fp32_precision, older()) == (product, precision)
        assert (backends.cudnn.conv.fp32_precision == "tf32") == (product == "tf32")
    backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):  # the older names, which Lightning reads
        older()
    with multiplying("highest"):
        assert backends.cuda.matmul.fp32_precision == "tf32"
    set_matmul_precision(matmul_precision_on("cpu", None))
    assert older() == "highest"
    assert matmul_precision_on("cuda", None) == "high"


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (("parallel=single",), 1),
        (("parallel=dp", "parallel.devices=2", "hardware.cpu_devices=2"), 2),
        (PROFILE, 1),
        pytest.param(FIT, 1, marks=pytest.mark.full),
    ],
    ids=["train", "ranks", "profile", "fit_batch"],
)
@pytest.mark.usefixtures("networks_for_ranks")
def test_every_process_of_a_run_has_it(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, words: Any, processes: int
) -> None:
    monkeypatch.setenv("MULTIPLYING", str(Path("notes").absolute()))

    def noted(*overrides: str) -> tuple[Path, set[str]]:
        Path("notes").unlink(missing_ok=True)
        path, lines = job(*NOTING, *overrides), Path("notes").read_text().splitlines()
        assert len({line.partition(" ")[0] for line in lines}) == processes
        said = {line.partition(" ")[2] for line in lines}
        assert said == {f"{read_json(path / 'result.json')['matmul_precision']} True"}
        return path, said

    path, said = noted(*words, f"{KEY}=medium")
    assert said == {"medium True"}
    if words == ("parallel=single",):
        assert noted("task=evaluate", f"checkpoint={path}")[1] == said, "as in the training"
        other = job(*NOTING, "task=evaluate", f"checkpoint={path}", f"{KEY}=high")
        told = read_json(other / "result.json")["differs_from_training"]
        assert told == f"{KEY}=high (trained with medium)"
    if words is PROFILE:
        assert Profile.load(path / "profile.json").meta["matmul_precision"] == "medium"
        assert noted(*words, f"{KEY}=high")[0] != path


@dataclass
class Samples:
    """A preprocessing that finds points where they are wanted."""

    device: Any = None
    dtype: Any = None

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"input": torch.zeros(len(samples), 8)}


@pytest.mark.parametrize("chosen", [None, "medium"])
def test_a_loaded_model_predicts_with_the_training_s(
    chosen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MULTIPLYING", str(tmp_path / "notes"))
    network = nn.Sequential(Multiplying(), nn.Linear(8, 2))
    model = Model(network, ["a", "b"], Samples(), matmul_precision=chosen)  # type: ignore[arg-type]
    model.predict_samples([{}])
    said = (tmp_path / "notes").read_text().split()[1:]
    assert said == [chosen or "highest", str(chosen is not None)]
    assert torch.backends.cudnn.allow_tf32, "the process is the user's"


@pytest.mark.parametrize(
    ("accelerator", "one", "other", "noted"),
    [
        ("cuda", {"matmul_precision": "high"}, {"matmul_precision": "medium"}, True),
        ("cuda", {"matmul_precision": "high"}, {}, True),
        ("cpu", {KEY: "highest", "matmul_precision": "highest"}, {}, False),
    ],
)
def test_means_over_unlike_precisions_are_noted(accelerator, one, other, noted) -> None:
    own = {"hardware_devices": "1 x a device", "hardware_accelerator": accelerator}
    rows = plain_rows(
        {**own, **each, "seed": n, "run_id": n} for n, each in enumerate((one, other))
    )
    words = "runs 0, 1 differ in matmul_precision: the mean is over all"
    assert unlike_notes(rows, of_training) == [words] * noted
    assert len({MeasuringPlace.of(row).hardware for row in rows}) == 1 + noted
