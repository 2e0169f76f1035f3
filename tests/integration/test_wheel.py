"""What is installed from the wheel: the command's configuration, and the model of a run."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import trimesh

from sparsepipe.launch.job import run_job
from tests.support.command_line import composed
from tests.support.paths import environment, run_python

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
_LOADING = re.compile(
    r"^```python\n((?:(?!^```).)*sparsepipe\.load\((?:(?!^```).)*)^```", re.M | re.S
)
_COMMAND = """
import runpy
try:
    runpy.run_module("sparsepipe", run_name="__main__")
except SystemExit as end:
    assert not end.code
"""
"""The command with the arguments of the process, which goes on with what it has imported."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as they are installed."""
    built = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, ROOT],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(built / "site")
    return built / "site"


def python(site: Path, cwd: Path, *arguments: str) -> str:
    """What Python prints, which finds the wheel's files."""
    done = run_python(cwd, *arguments, env=environment(PYTHONPATH=str(site)))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_the_configuration(site: Path, tmp_path: Path) -> None:
    shipped = {path.relative_to(site / "sparsepipe") for path in site.rglob("conf/**/*.yaml")}
    assert shipped == {path.relative_to(ROOT) for path in ROOT.glob("conf/**/*.yaml")}
    printed = python(site, tmp_path, "-m", "sparsepipe", "--cfg", "job", "experiment=demo")
    assert "name: demo" in printed
    where = python(
        site,
        tmp_path,
        "-c",
        "import sys; from hydra.core.plugins import Plugins; Plugins.instance();"
        "from sparsepipe.config.compose import config_dir; print(config_dir());"
        "print(sys.modules['hydra_plugins.sparsepipe_launcher'].__file__)",
    )
    plugins = site / "hydra_plugins"
    assert not (plugins / "__init__.py").exists(), "a namespace that plugins share"
    assert where.splitlines() == [
        str(site / "sparsepipe" / "conf"),
        str(plugins / "sparsepipe_launcher" / "__init__.py"),
    ]


def test_what_documents_show_of_a_loaded_model_runs(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed package predicts a file by the command and, in five lines, without it."""
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        for name, mesh in (
            ("ball", trimesh.creation.icosphere(2, radius=1 + number)),
            ("box", trimesh.creation.box([1, 1 + number / 8, 1])),
        ):
            path = tmp_path / "parts" / name / f"{number}.stl"
            path.parent.mkdir(parents=True, exist_ok=True)
            mesh.export(path)
    trimesh.creation.box([2, 2, 1]).export(tmp_path / "part.stl")
    settings = (
        *("data=folder", "data.root=parts", "data.num_points=256", "data.cached_points=512"),
        *("data.resolution=8", "model=sparse_vgg11_bn", "model.width=0.0625", "task.gallery=0"),
        *("trainer.max_epochs=1", "hardware.accelerator=cpu", "data.cache_workers=1"),
    )
    run = str(run_job(composed(*settings)).path)
    blocks = [block for path in DOCUMENTS for block in _LOADING.findall(path.read_text())]
    blocks = [block for block in blocks if "part.stl" in block]  # others load networks of scenes
    assert blocks
    code = "\n".join(re.sub(r'"outputs/[^"]*"', repr(run), block) for block in blocks)
    command = ("task=predict", f"checkpoint={run}", "input=part.stl")
    directory, loaded, *_ = python(site, tmp_path, "-c", _COMMAND + code, *command).split()
    table = (Path(directory) / "predictions.csv").read_text().splitlines()
    assert table[1].startswith(f"part.stl,{loaded},")
