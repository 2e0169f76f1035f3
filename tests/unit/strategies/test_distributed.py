"""Ranks of a Trainer: how many there are, how each finds its place, joins and leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies import (
    DataParallelStrategy,
    PipelineStrategy,
    RankEnvironment,
    SynchronousPipelineStrategy,
)
from sparsepipe.strategies.distributed import check_ranks
from sparsepipe.utils.process import give_freed_memory_back
from tests.support.command_line import wait_for
from tests.support.freed_blocks import kept_mib, needs_glibcs_own
from tests.support.paths import environment, run_python
from tests.support.pipeline_cases import QUIET, make_loader, make_net, pipeline_trainer
from tests.support.processes import new_store, outcomes, run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sparsepipe_dp", DataParallelStrategy),
        ("sparsepipe_async", PipelineStrategy),
        ("sparsepipe_gpipe", SynchronousPipelineStrategy),
        ("sparsepipe_1f1b", SynchronousPipelineStrategy),
        ("sparsepipe_eager_1f1b", SynchronousPipelineStrategy),
    ],
)
def test_registered_by_name(name: str, kind: type) -> None:
    trainer = pl.Trainer(
        strategy=name, accelerator="cpu", devices=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    assert isinstance(trainer.strategy, kind)
    assert trainer.world_size == 2
    if isinstance(trainer.strategy, SynchronousPipelineStrategy):
        assert trainer.strategy.schedule == name.removeprefix("sparsepipe_")


def test_environment_takes_ranks_as_the_agent_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second of two hosts, the first of which runs three ranks.
    place = {"RANK": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "GROUP_RANK": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    environment = RankEnvironment()
    assert environment.creates_processes_externally
    environment.set_world_size(4)
    environment.set_global_rank(3)  # what Lightning computes from equal counts
    assert (environment.world_size(), environment.global_rank()) == (5, 4)
    assert (environment.local_rank(), environment.node_rank()) == (1, 1)


def test_mean_of_counts_keeps_the_fraction() -> None:
    count = torch.tensor(9)
    assert DataParallelStrategy().reduce(count, reduce_op="mean").is_floating_point()
    assert not DataParallelStrategy().reduce(count, reduce_op="sum").is_floating_point()


def test_hosts_may_have_unequal_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = RankEnvironment()
    for name, value in (("WORLD_SIZE", 5), ("LOCAL_WORLD_SIZE", 2), ("GROUP_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    check_ranks(environment, nodes=2, devices=2)
    for nodes, devices in ((2, 3), (3, 2), (1, 2)):
        with pytest.raises(ConfigError, match="number of running ranks is 5"):
            check_ranks(environment, nodes=nodes, devices=devices)
    check_ranks(environment, nodes=1, devices=5)


def place() -> dict[str, str]:
    """The variables of this process's environment that give its rank."""
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize("kind", ["pipeline", "keyed", "dp"])
def test_one_device_leaves_nothing_behind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    before = place()
    if kind == "dp":
        trainer = pl.Trainer(
            **QUIET, devices=1, max_epochs=1, strategy=DataParallelStrategy(timeout_s=60)
        )
    else:
        trainer = pipeline_trainer("1", [], keyed_randomness=kind == "keyed", max_epochs=1)
    net, loader = make_net("dense"), make_loader("dense", batches=2)
    for use in (trainer.fit, trainer.validate):
        use(net, loader)
        assert place() == before
        assert (process_group.world_size(), process_group.started_externally()) == (1, False)
        assert process_group.gather_objects("here") == ["here"]
    assert trainer.world_size == 1


def asking(rank: int, kind: str, devices: int) -> Any:
    if kind == "dp":
        trainer = pl.Trainer(**QUIET, devices=devices, strategy=DataParallelStrategy(timeout_s=60))
    else:
        trainer = pipeline_trainer("-".join("1" * devices), list(range(1, devices)))
    trainer.validate(make_net("dense"), make_loader("dense", batches=2))


@pytest.mark.parametrize("kind", ["pipeline", "dp"])
@pytest.mark.parametrize("devices", [1, 3])
def test_ranks_that_the_trainer_did_not_ask_for(kind: str, devices: int) -> None:
    """As torchrun starts them with another --nproc_per_node."""
    for end in outcomes(asking, 2, kind, devices, limit_s=60):
        assert isinstance(end.error, ConfigError), end
        assert end.error.message == (
            f"the Trainer has devices={devices} and num_nodes=1, but the number of running ranks "
            "is 2"
        )
        assert end.error.remedy


def kept_after_training(rank: int, config: str, cuts: list[int]) -> int:
    give_freed_memory_back()
    trainer = pipeline_trainer(config, cuts, max_epochs=1)
    trainer.fit(make_net("dense"), make_loader("dense", batches=3))
    return kept_mib()


@needs_glibcs_own
def test_ranks_on_processors_keep_what_they_free() -> None:
    assert min(run(kept_after_training, 2, "1-1", [3])) > 190


@needs_glibcs_own
def test_one_device_leaves_the_memory_of_its_process_alone() -> None:
    assert run(kept_after_training, 1, "1", [], join_group=False)[0] < 10


LEAVING = """
import atexit, os, signal, sys, threading
from pytorch_lightning.utilities.exceptions import SIGTERMException
from sparsepipe.strategies.distributed import exit_if_blocked

def end(case):
    name, error, blocked, after = case
    atexit.register(lambda: print(name, "cleans up", flush=True))
    exit_if_blocked(error, blocked=lambda: blocked)
    if after == "later":
        atexit.register(lambda: print(name, "cleans up later", flush=True))
    if blocked:  # not a daemon's end: Python would wait for it, or abort in it
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if after == "raise":
        raise error

CASES = (
    ("uncaught", ValueError("mine"), True, "raise"),
    ("caught, free", ValueError("mine"), False, "return"),
    ("caught, blocked", ValueError("mine"), True, "later"),
    ("interrupted", KeyboardInterrupt(), True, "return"),
    ("terminated", SIGTERMException(), True, "raise"),
    ("exits", SystemExit(7), True, "raise"),
    ("exits, free", SystemExit(7), False, "raise"),
)
for case in CASES:
    child = os.fork()
    if not child:
        end(case)
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(case[0], "ends with", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.full
def test_the_status_is_the_errors_and_others_clean_up_first(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-c", LEAVING)
    assert done.returncode == 0, done.stderr
    codes = {
        "uncaught": 1,
        "caught, free": 0,
        "caught, blocked": 1,
        "interrupted": 130,
        "terminated": 143,
        "exits": 7,
        "exits, free": 7,
    }
    late = "caught, blocked"
    assert done.stdout.splitlines() == [
        line
        for name, code in codes.items()
        for line in (f"{name} cleans up{' later' * (name == late)}", f"{name} ends with {code}")
    ]
    assert "ValueError: mine" in done.stderr


RANKS = """
import atexit, os, signal, sys
import pytorch_lightning as pl
from tests.support.pipeline_cases import make_loader, make_net, pipeline_trainer
atexit.register(lambda: print("cleaned up", flush=True))

class Ends(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            if sys.argv[1] == "error":
                raise ValueError("mine")
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

pipeline_trainer("1-1", [3], max_epochs=1, callbacks=[Ends()]).fit(
    make_net("dense"), make_loader("dense", batches=60)
)
"""


STORES: list[Any] = []


def start(directory: Path, script: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two ranks that run a script, and meet at a store of this process, which lives on."""
    (directory / "script.py").write_text(script)
    store = new_store()
    place = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    STORES.append(store)
    return [
        subprocess.Popen(
            [sys.executable, "script.py", *arguments],
            cwd=directory,
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.full
@pytest.mark.parametrize(("how", "status"), [("error", 1), ("SIGINT", 130), ("SIGTERM", 143)])
def test_a_rank_that_ends_early(tmp_path: Path, how: str, status: int) -> None:
    """The other one waits for it: here the first misses a peer, or gets the signal."""
    ranks = start(tmp_path, RANKS, how)
    told = [rank.communicate(timeout=90) for rank in ranks]
    assert ranks[1].returncode == status, told
    assert ranks[0].returncode == (143 if how == "SIGTERM" else 1), told
    assert all("cleaned up" in out for out, _ in told)


STANDS_AT_THE_END = """
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
        trainer.strategy.pipeline.worker.network._timeout_s = 4.0
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
    ranks = start(tmp_path, STANDS_AT_THE_END)
    try:
        told, _ = ranks[0].communicate(timeout=180)
    finally:
        for rank in ranks:
            rank.kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 1, told
    assert told.startswith("rank 1 (stage 1)")
    assert told.endswith("goes on\n")


STANDS = """
import os, signal, sys
from pathlib import Path
import pytorch_lightning as pl
from tests.support.pipeline_cases import QUIET, make_loader, make_net
from sparsepipe.strategies import DataParallelStrategy, PipelineStrategy

class Stands(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

strategy = {
    "pipeline": lambda: PipelineStrategy(config="1-1", cuts=[3], timeout_s=20),
    "dp": lambda: DataParallelStrategy(process_group_backend="gloo", timeout_s=20),
}[sys.argv[1]]()
pl.Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1, callbacks=[Stands()]).fit(
    make_net("dense"), make_loader("dense", batches=60)
)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallel", "says"), [("pipeline", "rank 1 (stage 1)"), ("dp", "Timed out waiting")]
)
def test_lightnings_launcher_leaves_no_rank_that_stands_still(
    tmp_path: Path, parallel: str, says: str
) -> None:
    (tmp_path / "script.py").write_text(STANDS)
    with (tmp_path / "told").open("w") as told:  # no pipe, whose end the other rank would hold
        done = subprocess.run(
            [sys.executable, "script.py", parallel],
            cwd=tmp_path,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stderr=told,
            timeout=120,
            check=False,
        )
    stopped = int((tmp_path / "pid").read_text())
    try:
        text = (tmp_path / "told").read_text()
        assert done.returncode == 1, text
        assert says in text
        wait_for(lambda: not Path(f"/proc/{stopped}/cwd").exists(), timeout_s=10)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)


ROOT = Path(__file__).parents[3]
SCRIPTS = [ROOT / "docs" / "own_module.py", ROOT / "docs" / "own_unet.py"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [pytest.param((), id="Lightning's launcher"), pytest.param(TORCHRUN, id="torchrun")],
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs(tmp_path: Path, launcher: tuple[str, ...], script: Path) -> None:
    told = (
        "import runpy, torch; torch.manual_seed(0); "
        f"found = runpy.run_path({str(script)!r}); trainer = found['trainer']; "
        "print(trainer.world_size, 'ranks', trainer.strategy.strategy_name, end=' ') "
        "if trainer.is_global_zero else None"
    )
    (tmp_path / "script.py").write_text(told)
    done = run_python(tmp_path, *launcher, "script.py", env=environment(GLOO_SOCKET_IFNAME="lo"))
    assert done.returncode == 0, done.stderr
    name = "sparsepipe_async" if script is SCRIPTS[0] else "sparsepipe_spatial"
    assert f"2 ranks {name} " in done.stdout
