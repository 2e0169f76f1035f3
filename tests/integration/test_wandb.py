"""Weights & Biases without network, and with a stand-in for its server: one run a job."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsepipe.errors import ConfigError
from sparsepipe.launch.job import run_job
from sparsepipe.tracking.history import STEP
from sparsepipe.tracking.loggers import wandb_logger
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed, fault, orphans, rows, wait_for
from tests.support.emulated_cases import hosts
from tests.support.wandb_records import recorded, wandb_file

Job = Callable[..., Path]
TRACKED = ("logger=wandb", "trainer.log_every_n_steps=1")
MEASURED = ("train/loss_step", "train/accuracy_step", "val/loss", "val/accuracy", "test/loss", "lr")


def test_what_a_training_shows(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sparsepipe")
    run = job(*TRACKED, "trainer.max_epochs=1", "tags=[a,2026]")
    assert f"`wandb sync {run / 'wandb'}` uploads it" in caplog.text
    assert sys.modules["wandb"].run is None
    assert not {"WANDB_DATA_DIR", "WANDB_SILENT", "WANDB__SERVICE_WAIT"} & set(os.environ)
    assert {path.name for path in Path.cwd().iterdir()} == {"outputs"}
    found = recorded(run)
    about = {name: found.run[name] for name in ("run_id", "run_group", "job_type", "tags")}
    assert about == {
        "run_id": f"tiny-{run.name}",
        "run_group": "tiny",
        "job_type": "train",
        "tags": ["a", "2026"],
    }
    assert found.config["data"]["batch_size"] == 4
    assert found.config["trainer"]["max_epochs"] == 1
    assert [row["_step"] for row in found.history] == list(range(len(found.history)))
    assert [row[STEP] for row in found.metrics] == [*range(8), 7, 7, 7, 8]
    result = read_json(run / "result.json")
    for name in ("val/accuracy", "train/loss", "test/accuracy", "epoch_time_s"):
        assert found.summary[name] == pytest.approx(result[name])
    assert set(found.media) == {
        "confusion_matrix_table",
        "figures/confusion",
        "figures/learning_curves",
        "figures/per_class_accuracy",
    }
    table = read_json(found.media["confusion_matrix_table"])
    assert table["columns"] == ["Actual", "Predicted", "nPredictions"]
    assert sum(row[2] for row in table["data"]) == 9
    assert found.of("exit")[0].get("exit_code", 0) == 0


def under_an_agent(monkeypatch: pytest.MonkeyPatch, *, run_id: str | None, **more: str) -> None:
    """As ``wandb agent`` starts a trial."""
    given = {"WANDB_SWEEP_ID": "sweep7", **({"WANDB_RUN_ID": run_id} if run_id else {}), **more}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_under_a_sweep_agent(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that the agent has chosen has the whole history, and the results of the end."""
    under_an_agent(monkeypatch, run_id="trial3")
    run = job(*TRACKED, "trainer.max_epochs=1")
    found = recorded(run)
    about = {name: found.run[name] for name in ("run_id", "run_group", "sweep_id")}
    assert about == {"run_id": "trial3", "run_group": "sweep7", "sweep_id": "sweep7"}
    assert [row[STEP] for row in found.metrics] == [*range(8), 7, 7, 7, 8]
    assert found.summary["test/accuracy"] == read_json(run / "result.json")["test/accuracy"]
    assert "figures/confusion" in found.media
    assert found.of("exit")[0].get("exit_code", 0) == 0


@pytest.mark.full
def test_trials_that_share_a_configuration_keep_their_history(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two agents' trials, and of attempts at one, everything that was logged stays."""
    short = (*TRACKED, "trainer.max_epochs=1", fault([(3, 0), (5, 0)]))
    under_an_agent(monkeypatch, run_id="trial3", WANDB_RUN_GROUP="mine")
    for _ in range(2):
        with pytest.raises(ValueError, match="somebody's own mistake"):
            job(*short)
    under_an_agent(monkeypatch, run_id="trial4")
    run = job(*short)
    (earlier,) = (run / "wandb-earlier").glob("offline-run-*-trial3")
    kept = {path.name.rpartition("-")[2] for path in (run / "wandb").glob("offline-run-*")}
    assert kept == {"trial3", "trial4"}
    assert len(list((run / "wandb-earlier").glob("history.jsonl*"))) == 2
    assert list(earlier.glob("*.wandb"))
    (last,) = (run / "wandb").glob("offline-run-*-trial4/*.wandb")
    assert wandb_file(last).run["run_group"] == "mine"


def test_the_open_run_of_somebody_else_is_left_alone(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    theirs = wandb.init(mode="offline", dir=tmp_path, project="theirs")
    try:
        with pytest.raises(ConfigError, match=f"open in this process: {theirs.id}"):
            job(*TRACKED, "trainer.max_epochs=1")
        assert wandb.run is theirs
        theirs.log({"still": 1})
    finally:
        wandb.finish()
        wandb.teardown()


@pytest.mark.full
def test_failed_and_forced_runs_are_ended_and_kept_apart(job: Job) -> None:
    short = ("logger=wandb", "trainer.max_epochs=1", fault([(3, 0)]))
    with pytest.raises(ValueError, match="somebody's own mistake"):
        job(*short)
    assert sys.modules["wandb"].run is None
    (failed,) = (path.parent for path in Path.cwd().glob("outputs/tiny/*/config.yaml"))
    assert recorded(failed).of("exit")[0]["exit_code"] == 1
    run = job(*short)
    assert run == failed
    assert recorded(run).run["run_id"] == f"tiny-{run.name}"
    assert [row["epoch"] for row in recorded(run).metrics if "val/loss" in row] == [0]
    job(*short, "force=true")
    assert recorded(run).run["run_id"] == f"tiny-{run.name}-2"


@pytest.mark.full
@pytest.mark.timeout(600)  # three processes and a job, one after another
def test_killed_and_interrupted_runs_stay_one(shell: Shell, job: Job) -> None:
    """What was done twice is there once, what a kill took from Weights & Biases is there too."""
    settings = (*TRACKED, "trainer.max_epochs=3", "model.dropout=0.5", "data.train_size=40")
    faulty = (*settings, fault([(13, signal.SIGKILL), (17, signal.SIGINT)]))
    assert shell(*faulty).code == -signal.SIGKILL
    assert shell(*faulty).code == 130
    assert recorded(shell.runs()[0]).of("exit")[0]["exit_code"] == 1
    ours = recorded(job(*faulty))
    theirs = recorded(job(*settings, "name=undisturbed"))
    assert [row["_step"] for row in ours.history] == list(range(len(ours.history)))
    for name in MEASURED:
        told = [
            [(row[STEP], row["epoch"], row[name]) for row in found.metrics if name in row]
            for found in (ours, theirs)
        ]
        assert told[0] == told[1], name
    assert [row.keys() for row in ours.metrics] == [row.keys() for row in theirs.metrics]
    assert ours.config["data"]["train_size"] == 40
    assert ours.media.keys() == theirs.media.keys()
    assert ours.run["run_id"] == f"tiny-{shell.runs()[0].name}"


@pytest.mark.full
def test_a_tracker_that_is_added_later_gets_all_epochs(shell: Shell, job: Job) -> None:
    faulty = ("trainer.max_epochs=3", fault([(17, signal.SIGKILL)]))
    assert shell(*faulty).code == -signal.SIGKILL
    run = job(*faulty, "logger=wandb")
    told = {row["epoch"]: row["val/loss"] for row in recorded(run).metrics if "val/loss" in row}
    assert told == {int(row["epoch"]): pytest.approx(float(row["val/loss"])) for row in rows(run)}
    assert sorted(told) == [0, 1, 2]


@pytest.mark.full
def test_a_pipeline_of_two_ranks_is_one_run_with_its_plan(shell: Shell) -> None:
    split = ("parallel=pipeline", "hardware=cores", "parallel.devices=2")
    layers = ("model.norm=true", "parallel.plan.balance=layers")
    run = shell(*TRACKED, *split, *layers, "trainer.max_epochs=1").run
    found = recorded(run)
    # Rank 0 has the loss of a minibatch when its gradients have come back, a step later.
    assert [row[STEP] for row in found.metrics if "train/loss_step" in row] == [*range(1, 8)]
    assert found.config["plan"]["config"] == "1-1"
    assert {"figures/timeline", "tables/plan", "confusion_matrix_table"} <= set(found.media)
    table = read_json(found.media["tables/plan"])
    assert table["columns"] == ["stage", "first", "last", "devices"]
    assert [row[:3] for row in table["data"]] == [[0, 0, 2], [1, 3, 4]]


def test_a_task_without_a_trainer(tmp_path: Path) -> None:
    run = run_job(composed(
        f"paths.outputs={tmp_path}", "task=simulate", "hardware=paper_5gpu", "parallel=hete_mp",
        "parallel.search.bandwidth_bytes_per_s=60e6", "task.timeline_minibatches=3",
        "logger=wandb", "tags=[paper]",
    )).path  # fmt: skip
    found = recorded(run)
    assert (found.run["job_type"], found.run["tags"]) == ("simulate", ["paper"])
    assert found.config["task"]["timeline_minibatches"] == 3
    result = read_json(run / "result.json")
    for name in ("simulated_shapes_per_s", "speedup_over_dp", "plan_config"):
        assert found.summary[name] == result[name]
    assert set(found.media) == {"figures/timeline", "tables/devices", "tables/plan"}
    table = read_json(found.media["tables/devices"])
    assert len(table["data"]) == 5
    column = table["columns"].index("busy_share")
    assert all(0 < row[column] <= 1 for row in table["data"])
    assert len(found.history) == 1


@pytest.mark.full
def test_the_launching_process_logs_an_emulated_run(shell: Shell) -> None:
    """Its ranks may be where no server can be reached."""
    settings = ("hardware.network=loopback", "trainer.limit_train_batches=8", "logger=wandb")
    run = shell(*hosts(shell.cwd), "parallel=dp", *settings).run
    found = recorded(run)
    assert found.run["job_type"] == "train_emulated"
    assert found.summary["kind"] == "emulated"
    assert found.summary["samples_per_s"] == read_json(run / "result.json")["samples_per_s"]


def test_online_needs_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    given = {"project": "p", "run_id": "a", "run_dir": tmp_path, "job_type": "train"}
    with pytest.raises(ConfigError, match=r"offline=false needs a Weights & Biases login"):
        wandb_logger(offline=False, **given)
    assert wandb_logger(**given)._offline


EPOCHS, STEPS = 3, {"single": 8, "dp": 4}  # of an epoch: 32 shapes, 4 for each device
SWEEP = (
    "hydra/launcher=sparsepipe",
    "hydra.launcher.cores_per_rank=1",
    "hardware.accelerator=cpu",
    "paper/trial=one_device,two_ranks,batch_search",
    f"trainer.max_epochs={EPOCHS}",
    "trainer.log_every_n_steps=1",
    "data.delay_s=0.1",
    "logger=wandb",
    "tags=[swept]",
)
KILL_AFTER = (2, 5)  # epochs of all trainings
LIMIT_S = 400.0


def epochs(shell: Shell) -> int:
    tables = shell.cwd.glob("outputs/tiny/*/metrics.csv")
    return sum(max(0, len(table.read_text().splitlines()) - 1) for table in tables)


def assert_told_once(run: Path) -> None:
    """One run with its settings, whose history goes on from row to row as if it had no pauses."""
    found = recorded(run)
    result = read_json(run / "result.json")
    assert found.run["run_id"] == f"tiny-{run.name}"
    assert (found.run["job_type"], found.run["tags"]) == (result["task_name"], ["swept"])
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for group in ("data", "model", "optim", "task", "trainer"):
        assert found.config[group] == settings[group]
    assert [row["_step"] for row in found.history] == list(range(len(found.history)))
    assert found.summary["kind"] == "measured"
    assert found.of("exit")[0].get("exit_code", 0) == 0
    if result["task_name"] == "fit_batch":
        assert found.summary["largest_batch"] == 8
        return
    steps = [row[STEP] for row in found.metrics if "train/loss_step" in row]
    assert steps == list(range(EPOCHS * STEPS[result["strategy"]])), "each step once"
    for name in ("val/loss", "val/accuracy", "train/loss"):
        told = [(row["epoch"], row[name]) for row in found.metrics if name in row]
        kept = [(int(row["epoch"]), pytest.approx(float(row[name]))) for row in rows(run)]
        assert told == kept, name
    assert found.summary["test/accuracy"] == pytest.approx(result["test/accuracy"])
    assert "confusion_matrix_table" in found.media


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_sweep_that_is_killed_leaves_one_run_for_each_job(shell: Shell) -> None:
    for count in KILL_AFTER:
        sweep = shell.start(*SWEEP, "hydra.mode=MULTIRUN")
        wait_for(lambda count=count: epochs(shell) >= count, timeout_s=LIMIT_S)
        assert sweep.poll() is None, "it was too fast to be killed"
        sweep.kill()
        shell.wait(sweep)
        assert not orphans(shell.cwd)
    done = shell.sweep(*SWEEP, timeout_s=LIMIT_S)
    assert done.code == 0, done.err
    runs = shell.runs()
    assert Counter(read_json(run / "result.json")["strategy"] for run in runs) == {
        "single": 2, "dp": 1,
    }  # fmt: skip
    begun = [read_json(run / "result.json")["starts"] for run in runs]
    assert max(begun) > 1, "at least one was killed in the middle"
    for run in runs:
        assert_told_once(run)
    (group,) = {recorded(run).run["run_group"] for run in runs}
    assert re.fullmatch(r"tiny [0-9a-f]{8}", group), "of the sweep, however often it was started"


class Server(ThreadingHTTPServer):
    """Takes what the client uploads, and answers as little as it is content with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: list[dict[str, Any]] = []
        self.chunks: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.exit_code: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def history(self) -> list[dict[str, Any]]:
        """All rows, which have come one after another."""
        rows: list[dict[str, Any]] = []
        for chunk in self.chunks:
            assert chunk["offset"] == len(rows)
            rows += map(json.loads, chunk["content"])
        return rows

    def query(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        if name == "UpsertBucket":
            self.runs.append(variables)
            of = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
            return {"upsertBucket": {"inserted": True, "bucket": {
                "id": "b", "name": variables["name"], "displayName": variables["displayName"],
                "historyLineCount": 0, "project": of,
            }}}  # fmt: skip
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/{f}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if name == "CreateArtifact":
            return {"createArtifact": {"artifact": {
                "id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s"},
            }}}  # fmt: skip
        if name == "Viewer":
            return {"viewer": {
                "id": "v", "username": "me", "name": "me", "email": "", "entity": "me",
                "admin": False, "flags": "{}", "teams": {"edges": []},
            }}  # fmt: skip
        return {"project": None}  # nobody has made an artifact of that name before

    def stream(self, files: dict[str, Any], exit_code: int | None) -> None:
        if "wandb-history.jsonl" in files:
            self.chunks.append(files["wandb-history.jsonl"])
        self.exit_code = self.exit_code if exit_code is None else exit_code


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._body()
        self.server.files.append(self.path[1:])
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            asked = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1]
            self._answer({"data": self.server.query(name, asked.get("variables") or {})})
            return
        if self.path.endswith("/file_stream"):
            told = json.loads(body)
            self.server.stream(told.get("files") or {}, told.get("exitcode"))
        self._answer({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
        yield found
        found.shutdown()


def assert_whole(server: Server, run: Path) -> None:
    """One run with all that it has, whose history goes on from row to row."""
    told = {(sent["name"], sent["project"]) for sent in server.runs}
    assert told == {(f"tiny-{run.name}", "sparsepipe")}
    assert server.runs[0]["groupName"] == "tiny"
    assert server.runs[0]["jobType"] == "train"
    assert [row["_step"] for row in server.history] == list(range(len(server.history)))
    steps = [row[STEP] for row in server.history if "train/loss_step" in row]
    assert steps == list(range(16))
    assert [row["epoch"] for row in server.history if "time/epoch_s" in row] == [0, 1]
    assert server.exit_code == 0
    uploaded = {file for file in server.files if file.startswith("media/images/figures/confusion")}
    assert len(uploaded) == 1
    assert "config.yaml" in server.files


@pytest.mark.full
def test_a_resumed_run_is_synced_as_one(job: Job, server: Server) -> None:
    faulty = (*TRACKED, fault([(11, 0)]))
    with pytest.raises(ValueError, match="somebody's own mistake"):
        job(*faulty)
    run = job(*faulty)
    assert not server.runs, "offline nothing is sent"
    synced = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", run / "wandb"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "Finished syncing" in synced.stderr + synced.stdout
    assert_whole(server, run)
    assert len(server.history) == len(recorded(run).history)


@pytest.mark.full
def test_online(job: Job, server: Server) -> None:
    run = job(*TRACKED, "logger.wandb.offline=false")
    assert sys.modules["wandb"].run is None
    assert_whole(server, run)
