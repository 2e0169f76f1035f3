"""What docs/experiments.md says of the smallest scale is what it composes and what it has left."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from tests.support.command_line import composed

ROOT = Path(__file__).parents[2]


def test_few_shapes_of_few_classes_are_tested_at_scale_smoke() -> None:
    text = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"^\| tested on \| ([^|]*) \|", text, re.MULTILINE)
    batches, shapes, of_all, classes = map(int, re.findall(r"\d+", told))
    config = composed("experiment=table2", "scale=smoke", "paper/trial=one_device")
    assert batches == config.trainer.limit_test_batches
    assert shapes == batches * config.data.get("batch_size")
    per_class = config.data.get("source")["test_per_class"]
    assert classes == shapes // per_class
    with (ROOT / "experiments/table2_smoke/ledger.csv").open(encoding="utf-8") as stream:
        trainings = [row for row in csv.DictReader(stream) if row["task_name"] == "train"]
    assert trainings
    for row in trainings:
        tested = [key for key, value in row.items() if key.startswith("test/accuracy/") and value]
        assert (len(tested), int(row["test_shapes"])) == (classes, of_all)
