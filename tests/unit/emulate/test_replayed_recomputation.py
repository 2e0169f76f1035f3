"""What a training of replay layers takes that recomputes them: to the millisecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsepipe.emulate.training import ReplayData, ReplayModule
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.replay_cases import Noted, plain_trainer, profile

MINIBATCHES, ROWS = 3, 8


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
@pytest.mark.parametrize(
    ("recompute", "again"),
    [("none", []), ("all", [0, 1, 2, 3]), ({"layers": [0, [2, 3]]}, [0, 2, 3])],
)
def test_a_step_takes_a_forward_more_of_what_is_recomputed(
    schedule: Any, recompute: Any, again: list[int], tmp_path: Path
) -> None:
    noted, measured = Noted(), profile(input_bytes=160)
    strategy = SynchronousPipelineStrategy(
        schedule=schedule, microbatches=4, recompute=recompute, config="1", cuts=[]
    )
    trainer = plain_trainer(tmp_path, strategy=strategy)
    module = ReplayModule(measured, noted.pace(), rows=ROWS)
    trainer.fit(module, datamodule=ReplayData(measured, minibatches=MINIBATCHES, rows=ROWS))
    more_s = sum(measured.layers[number].forward_s for number in again)
    assert sum(noted.taken) == pytest.approx(MINIBATCHES * (measured.compute_s + more_s))
