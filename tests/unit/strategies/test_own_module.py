"""The scripts that the README names: somebody's own modules, started in both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import environment, run_python

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
