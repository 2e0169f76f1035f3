"""What reaches a server: a stand-in for that of Weights & Biases, on this machine."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.tracking.history import STEP
from tests.support.command_line import fault
from tests.support.wandb_records import recorded

Job = Callable[..., Path]
TRACKED = ("logger=wandb", "trainer.log_every_n_steps=1")
pytestmark = pytest.mark.full


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


def test_online(job: Job, server: Server) -> None:
    run = job(*TRACKED, "logger.wandb.offline=false")
    assert sys.modules["wandb"].run is None
    assert_whole(server, run)
