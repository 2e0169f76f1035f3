"""The GPU kit where there is no GPU: its plan, its records, and how its parts end."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsepipe.runs.ledger import load_results

KIT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
no_device = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    """The script as a module; what it imports beside itself can be imported from then on."""
    spec = importlib.util.spec_from_file_location("gpu_kit", KIT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["gpu_kit"] = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def kit_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(KIT / "run.py"), *arguments]
    return subprocess.run(
        command, env=no_device, capture_output=True, text=True, timeout=120, check=False
    )


def test_what_comes_first_fits_nine_minutes_and_the_rest_has_what_is_left(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting_and_ending_s = 20
    first = [part for part in kit.PARTS if not part.later]
    assert sum(part.limit_s for part in first) + starting_and_ending_s <= 9 * 60
    options = argparse.Namespace(out=tmp_path, part=None, minutes=1.0)
    for passed_s, given_s in ((5.0, 45.0), (20.0, 30.0), (40.0, 0.0)):
        monkeypatch.setattr(kit, "STARTED_S", kit.time.perf_counter() - passed_s)
        parts = [kit._timed(part, options) for part in kit.PARTS]
        expected = first + [
            replace(p, limit_s=min(p.limit_s, given_s)) for p in kit.PARTS if p.later
        ]
        for part, other in zip(parts, expected, strict=True):
            assert replace(part, limit_s=other.limit_s) == other
            assert part.limit_s == pytest.approx(other.limit_s, abs=1)
    record = kit._run(parts[-1], options, tmp_path, {"device": "a device"})
    assert record.reason.startswith("no time was left")


def test_a_dry_run_names_parts_limits_and_what_is_missing(kit: ModuleType) -> None:
    ran = kit_run("--dry-run", "--minutes", "4.5")
    assert ran.returncode == 0, ran.stderr
    lines = iter(ran.stdout.splitlines())
    assert "no CUDA device" in next(lines)
    for number, part in enumerate(kit.PARTS, start=1):
        told = next(line for line in lines if line.startswith(f"{number}. "))
        assert f"{number}. {part.name}: " in told
        assert f"at most {part.limit_s / 2:.0f} s" in told
        assert ("needs a device: skipped" if part.needs_device else "a small size") in next(lines)


def test_parts_that_need_a_device_say_so_and_others_end_at_their_limit(
    kit: ModuleType, tmp_path: Path
) -> None:
    ran = kit_run("--out", str(tmp_path), "--part", "shared_device")
    assert ran.returncode == 0, ran.stderr
    record = kit.Record.read(tmp_path / "shared_device.json")
    assert (record.state, record.reason) == ("skipped", "it needs a CUDA device")
    late = kit_run("--out", str(tmp_path), "--part", "convolutions", "--minutes", "0.01")
    assert late.returncode == 1
    record = kit.Record.read(tmp_path / "convolutions.json")
    assert record.state == "over its limit"
    page = (tmp_path / "summary.md").read_text()
    assert "it needs a CUDA device" in page
    assert "over its limit" in page


def test_backends_and_libraries_that_are_not_there_get_rows(
    kit: ModuleType, tmp_path: Path
) -> None:
    import convolution_peers as peers

    path = tmp_path / "part.json"
    kit.Record(part="part", state="under way", limit_s=1.0, machine={}).write(path)
    with pytest.raises(ImportError, match="no option conf/backend/of_nobody"):
        peers.backend_of("of_nobody")
    assert peers.present(kit.Rows(path), peers.LIBRARIES, on_cuda=False) == []
    rows = kit.Record.read(path).rows
    assert [row["row"] for row in rows if not kit.counts(row)] == list(peers.LIBRARIES)


def test_layers_on_a_backend_s_own_maps_are_those_of_the_native_one(kit: ModuleType) -> None:
    from convolution_peers import Ours
    from convolutions import _errors, _in_float64
    from sparse_conv import make_batch, make_layers

    other, batch = Ours("native", "bf16"), make_batch(1, seed=0)
    other.name = "another"
    layer, maps = make_layers(batch, torch.float32)[3], other.maps(batch)
    assert max(_errors(other.operations(maps, 1, layer), _in_float64(layer))) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --out DIR"),
        (("--out", "."), ""),
        (("--out", ".", "--minutes", "0"), "above 0"),
        (("--out", ".", "--minutes", "nan"), "above 0"),
        (("--out", __file__), "is a file"),
    ],
)
def test_bad_arguments_are_refused(
    kit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    if not message:
        kit._options()
        return
    with pytest.raises(SystemExit) as refused:
        kit.main()
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_broken_records_are_refused(kit: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "profiles.json").write_text('{"part": "profiles"}')
    ran = kit_run("--out", str(tmp_path), "--part", "profiles")
    assert ran.returncode == 1
    assert "is no record of the GPU kit" in ran.stderr
    assert "remove it" in ran.stderr


def test_rows_are_measured_once_and_failures_again(kit: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    kit.Record(part="part", state="under way", limit_s=1.0, machine={}).write(path)

    def refuse() -> dict[str, Any]:
        raise ValueError("not today")

    rows = kit.Rows(path)
    assert rows.measure("one", lambda: {"value": 1})["value"] == 1
    assert rows.measure("two", refuse) is None
    assert kit.Record.read(path).failed[0]["error"] == "ValueError: not today"
    again = kit.Rows(path)
    assert again.measure("one", refuse)["value"] == 1
    assert again.measure("two", lambda: {"value": 2})["value"] == 2
    assert [row["row"] for row in kit.Record.read(path).rows] == ["one", "two"]


def test_a_skipped_part_keeps_its_rows_and_a_finished_one_without_figures_is_not_done(
    kit: ModuleType, tmp_path: Path
) -> None:
    machine = kit._machine(argparse.Namespace(commit=None))
    options = argparse.Namespace(out=tmp_path)
    part = next(part for part in kit.PARTS if part.needs_device)
    rows = [{"row": "one", "value": 1}, {"row": "peer", "missing": "not installed"}]
    record = kit.Record(
        part=part.name, state="finished", seconds=5.0, limit_s=1.0, machine=machine, rows=rows
    )
    record.write(tmp_path / f"{part.name}.json")
    skipped = kit._run(part, options, tmp_path, {**machine, "device": None})
    assert (skipped.state, skipped.rows, skipped.seconds) == ("skipped", rows, 5.0)
    replace(record, rows=rows[:1]).write(tmp_path / f"{part.name}.json")
    assert kit._run(part, options, tmp_path, {**machine, "device": None}).state == "finished"


def test_records_of_another_machine_or_commit_are_refused_and_kept(
    kit: ModuleType, tmp_path: Path
) -> None:
    rows = [{"row": "one", "value": 1}]
    machine = {"device": None, "torch": "0.0", "commit": "abc"}
    record = kit.Record(
        part="profiles", state="finished", limit_s=1.0, machine=machine, rows=rows
    )  # fmt: skip
    record.write(tmp_path / "profiles.json")
    ran = kit_run("--out", str(tmp_path), "--part", "shared_device")
    assert ran.returncode == 1
    assert "was measured with another torch" in ran.stderr
    assert kit.Record.read(tmp_path / "profiles.json") == record
    assert list(tmp_path.iterdir()) == [tmp_path / "profiles.json"]


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_signal_ends_the_part_and_leaves_a_record(
    kit: ModuleType, tmp_path: Path, signum: signal.Signals
) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, str(KIT / "run.py"), "--out", str(out), "--part", "convolutions"]
    environment = {**no_device, "TMPDIR": str(scratch)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready after" in line:
                break
        process.send_signal(signum)
        process.stdout.read()  # to its end, which the part's own process has, too
        assert process.wait(60) == 128 + signum
    record = kit.Record.read(out / "convolutions.json")
    assert (record.state, record.reason) == ("failed", "its start was ended by a signal")
    assert not list(scratch.glob("sparsepipe-gpu-*"))
    assert (out / "summary.md").exists()


def test_the_summary_has_tables_counts_and_a_ledger(kit: ModuleType, tmp_path: Path) -> None:
    machine = {"device": "a device", "torch": "2.11"}
    run = {"name": "table1", "run_id": "a1", "task_name": "table1", "kind": "measured"}
    rows = [
        {"row": "a run", "seconds": 1.5, "result": {**run, "flops_per_s": 2e12}},
        {"row": "the same run", "result": {**run, "flops_per_s": 2e12}},
        {"row": "a test", "outcome": "skipped", "why": "wants two devices"},
        {"row": "nothing to show"},
        {"row": "a fault", "error": "ValueError: of\nsome kind"},
    ]
    kit.Record(
        part="one",
        state="failed",
        limit_s=1.0,
        machine=machine,
        columns={"seconds": "time (s)"},
        rows=rows,
    ).write(tmp_path / "one.json")
    kit.write_summary(tmp_path, [("one", "The first"), ("two", "The second")])
    page = (tmp_path / "summary.md").read_text()
    assert "a device, torch 2.11" in page
    assert "| a run |      1.5 |" in page
    assert "- skipped wants two devices: 1" in page
    assert "- a fault failed: ValueError: of some kind" in page
    assert "nothing to show" not in page
    assert "The second" not in page
    (row,) = load_results(tmp_path).to_dict("records")
    assert (row["run_id"], row["flops_per_s"]) == ("a1", 2e12)
