"""What is left of a run that another rank breaks while all take leave of each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest
from torch import nn

from sparsepipe.errors import ConfigError, TransportError
from tests.support.paths import environment
from tests.support.pipeline_cases import Net, dense_layers, make_loader, pipeline_trainer
from tests.support.processes import new_store, outcomes

LAYERS = [type(layer) for layer in dense_layers()]


class Leaves(Net):
    """Ends the last rank after the last drain, at one of the times when others still need it."""

    def __init__(self, how: str) -> None:
        super().__init__(dense_layers())
        self._how = how

    def _leave(self, how: str) -> None:
        if self.trainer.global_rank == 1 and how == self._how:
            if how == "raises":
                raise ValueError("mine")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self) -> None:
        self._leave("raises")
        self._leave("killed before connections are closed")

    def cpu(self) -> Self:
        self._leave("killed before modules are put together")
        return super().cpu()


HOW = (
    "raises",
    "killed before connections are closed",
    "killed before modules are put together",
)


def catching(rank: int, how: str, target: Path) -> tuple[str, list[type[nn.Module]], bool]:
    """A script that goes on after the failure."""
    trainer = pipeline_trainer("1-1", [3], max_epochs=1)
    net = Leaves(how)
    with pytest.raises(TransportError) as told:
        trainer.fit(net, make_loader("dense", batches=4))
    with pytest.raises(ConfigError, match="this rank has the values of its own stage only"):
        trainer.save_checkpoint(target)
    return told.value.message, [type(layer) for layer in net.layers], target.exists()


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_is_left_alone_has_whole_layers_and_saves_nothing(
    tmp_path: Path, how: str
) -> None:
    found = outcomes(catching, 2, how, tmp_path / "half.ckpt", awaited=[0])[0]
    assert found.error is None, str(found)
    message, layers, saved = found.value
    assert message.startswith("rank 1 (stage 1)")
    assert layers == LAYERS
    assert not saved


SCRIPT = """
import os, signal, sys
import pytorch_lightning as pl
from tests.support.pipeline_cases import QUIET, make_loader, make_net
from sparsepipe.errors import TransportError
from sparsepipe.strategies import PipelineStrategy
from tests.support.waiting import LONG_S, shorten_limit

class Stands(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        # The limit of the waits that are to end in vain, and not of what comes before.
        trainer.strategy._pipeline.worker.network._timeout_s = 4.0
        shorten_limit(4.0)

strategy = PipelineStrategy(config="1-1", cuts=[3], timeout_s=LONG_S)
trainer = pl.Trainer(
    **QUIET, devices=2, strategy=strategy, max_epochs=1, callbacks=[Stands()]
)
try:
    trainer.fit(make_net("dense"), make_loader("dense", batches=4))
except TransportError as error:
    print(error.message)
print("goes on", flush=True)
"""


@pytest.mark.full
def test_a_rank_whose_peer_stands_still_at_the_end_leaves_at_once(tmp_path: Path) -> None:
    """Threads wait for that peer still, in which Python's own end may hang or abort.

    So this process ends without it, with the error's status although the script caught it.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    store = new_store()
    variables = environment(
        **{
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told, _ = ranks[0].communicate(timeout=180)
    finally:
        for rank in ranks:
            rank.kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 1, told
    assert told.startswith("rank 1 (stage 1)")
    assert told.endswith("goes on\n")
