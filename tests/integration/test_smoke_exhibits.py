"""The paper's other measured tables and figures, as small as can be, by the commands in the docs.

``make smoke`` runs them beside half of Table II.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sparsepipe.runs.ledger import load_results
from tests.support.command_line import orphans
from tests.support.paths import environment, run_python
from tests.support.reported_cells import cells, there

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(900)]
LIMIT_S = 600
LAYERS = 52  # of the paper's VGG16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all of them, so that shapes are made once."""
    return tmp_path_factory.mktemp("smoke")


def run(place: Path, command: str) -> list[Path]:
    """The runs that a command tells of."""
    inherited = {k: v for k, v in environment().items() if not k.startswith("SPARSEPIPE")}
    inherited.pop("OMP_NUM_THREADS")
    done = run_python(place, "-m", *command.split(), env=inherited, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert not orphans(place)
    return [Path(line) for line in done.stdout.splitlines() if Path(line).is_dir()]


def test_fig_8_at_its_coarsest_grid(place: Path) -> None:
    """Both networks from the sweep's command to its report and ledger."""
    run(place, "sparsepipe -m experiment=fig8 scale=smoke data.resolution=32")
    (file,) = place.glob("outputs/fig8/sweeps/*/report/fig8.csv")
    told = {
        key: float(cell["ours"])
        for key, cell in cells(file, "grid", "network").items()
        if key in there(file, "grid", "network")
    }
    quantities = ("train_accuracy", "test_accuracy", "inference_rate", "memory")
    assert set(told) == {("32³", net, name) for net in ("dense", "sparse") for name in quantities}
    for (_, _, quantity), value in told.items():
        assert 0 <= value <= 100 if "accuracy" in quantity else value > 0
    assert file.with_suffix(".png").exists()
    ledger = load_results(place / "outputs" / "fig8" / "ledger.csv")
    assert sorted(ledger["representation"]) == ["dense", "sparse"]
    assert ledger["fits"].all()
    assert (ledger["step_memory_bytes"] <= ledger["budget_bytes"]).all()


def test_table_1_has_a_column_of_this_machine(place: Path) -> None:
    (path,) = run(place, "sparsepipe experiment=table1 scale=smoke")
    with (path / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    (ours,) = [name for name in rows[0] if name.endswith("(measured here)")]
    assert sum(name.endswith("(paper)") for name in rows[0]) == 3
    assert all(row[ours] for row in rows)


def test_fig_7_has_every_layer_of_this_machine_and_of_the_authors(place: Path) -> None:
    (path,) = run(place, "sparsepipe experiment=fig7 scale=smoke")
    with (path / "shares.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == LAYERS
    shares = [name for name in rows[0] if name != "layer"]
    devices = {name.rpartition(": ")[0] for name in shares}
    assert sum(name.endswith("(authors)") for name in devices) == 3
    assert len(devices) == 4
    assert all(float(rows[-1][name]) == pytest.approx(1) for name in shares)
    assert (path / "shares.png").exists()
