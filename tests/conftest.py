"""Fixtures shared by every room."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import python_path

if TYPE_CHECKING:
    from tests.support.command_line import Shell
    from tests.support.fault_cases import Point

CHECK_DATA = "SPARSEPIPE_TEST_DATA"

# Without this, MKL may round the same product in another way where its operands lie elsewhere in
# memory (seen on an AMD EPYC), and bits that tests compare differ between processes. It is read
# at the first product, and inherited by the processes that tests start.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Where no GPU is, Triton's interpreter runs its kernels; it is told so before they are defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Lets tests interrupt their processes, also under nohup or in a script's background.

    Whoever starts the suite there has it ignore signals, and children inherit that. What is
    imported for collection stays: the garbage collector need not look at it again and again.
    """
    gc.disable()
    for signum in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_IGN:
            python = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if python else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Collects garbage of the tests from here on, among what they make."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Ends ranks that tests have shared."""
    if "tests.support.processes" in sys.modules:
        sys.modules["tests.support.processes"].end_shared()


@pytest.fixture(autouse=True)
def _products_as_torch_has_them() -> None:
    """Restores torch's defaults for products, which a run in this process leaves set."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


@pytest.fixture(scope="session")
def check_data() -> Path:
    """Root of the real data some tests read; they are skipped where it is absent."""
    root = os.environ.get(CHECK_DATA)
    if not root or not Path(root).is_dir():
        pytest.skip(
            f"no real data: set {CHECK_DATA} to a directory with ModelNet meshes and points"
        )
    return Path(root)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    from tests.support.command_line import Shell, orphans

    yield Shell(tmp_path)
    assert not orphans(tmp_path), "processes were left behind"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Point], Path]:
    """The run of a plan that nothing happens to."""
    from tests.support.command_line import Shell

    found: dict[tuple[str, ...], Path] = {}

    def run(point: Point) -> Path:
        if point.undisturbed not in found:
            shell = Shell(tmp_path_factory.mktemp("undisturbed"))
            found[point.undisturbed] = shell(*point.undisturbed).run
        return found[point.undisturbed]

    return run


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, in which this process is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def networks_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one starts find the small networks as it does."""
    monkeypatch.setenv("PYTHONPATH", python_path())


@pytest.fixture
def job(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs a job in this process, which is quicker where no signals or ranks matter."""
    from sparsepipe.launch.job import run_job
    from tests.support.command_line import composed

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *overrides: run_job(composed("experiment=tiny", *overrides)).path
