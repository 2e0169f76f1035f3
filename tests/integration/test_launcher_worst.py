"""A sweep in which a job hangs, one raises and one runs out of memory, beside one that is good."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sparsepipe.runs.ledger import load_results
from sparsepipe.sweep.record import records_of
from tests.support.command_line import Shell, fault, orphans
from tests.support.memory_group import memory_group

LIMIT_S = 60  # of a job; those that do not hang need a tenth of it
GROUP_BYTES = 3 * 10**9  # of all processes: several times what any needs but the hungry one
HANGS = "{stuck: {_target_: tests.support.tinyhouse.LongStep, step: 1}}"
HUNGRY = f"{{hungry: {{_target_: tests.support.tinysweep.Hungry, most_bytes: {2 * GROUP_BYTES}}}}}"
RAISES = fault([(1, 0)]).removeprefix("callbacks=")
SWEEP = (
    "hydra/launcher=sparsepipe",
    "hydra.launcher.cores_per_rank=1",
    f"hydra.launcher.job_limit_s={LIMIT_S}",
    "hardware.accelerator=cpu",
    "parallel.grace_s=1",
    "trainer.max_epochs=1",
    f"callbacks={HANGS},{RAISES},{HUNGRY},{{}}",
)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_is_named_and_the_good_one_is_done(shell: Shell) -> None:
    """The kernel itself ends the hungry one: the sweep has no more memory than its group."""
    with memory_group(GROUP_BYTES) as before:
        swept = Shell(shell.cwd, before=before).sweep(*SWEEP, timeout_s=600)
    assert swept.code == 1, swept.err
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    hung, raised, hungry, good = records_of(sweep)
    assert [record.status for record in (hung, raised, hungry)] == 3 * ["failed"]
    assert (good.status, good.exit_code) == ("finished", 0)
    assert swept.out == f"{good.run}\n"
    assert (Path(good.run or "") / "DONE.json").exists()
    assert [hung.exit_code, raised.exit_code, hungry.exit_code] == [1, 1, 128 + signal.SIGKILL]
    told = swept.err.partition("3 of 4 jobs failed:")[2]
    for number, words in (
        (1, f"ended by hydra.launcher.job_limit_s={LIMIT_S}"),
        (2, "ValueError: somebody's own mistake"),
        (3, "killed by the OOM killer: the machine (or the container) ran out of memory"),
    ):
        section = told.partition(f"\njob {number} (")[2].partition("\njob ")[0]
        assert words in section
        assert f"jobs/{number - 1}/log.txt" in section
    assert "\njob 4 (" not in told
    assert "run fewer at a time (hydra.launcher.max_jobs)" in told
    assert not orphans(shell.cwd)
    assert LIMIT_S <= hung.seconds < LIMIT_S + 60
    assert list(load_results(shell.cwd / "outputs/tiny/ledger.csv")["run_id"]) == [
        Path(good.run or "").name
    ]
