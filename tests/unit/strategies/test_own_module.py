"""The scripts that the README names: somebody's own modules, started in both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run(
        [sys.executable, *launcher, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name = "sparsepipe_async" if script is SCRIPTS[0] else "sparsepipe_spatial"
    assert f"2 ranks {name} " in done.stdout
