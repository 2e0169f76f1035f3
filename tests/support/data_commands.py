"""The command line on small trees of meshes, as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.data_helpers import SLOW

LIMITED = """
import resource, sys
from sparsepipe.cli import main

if __name__ == "__main__":
    most = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    main()
"""

SLOWLY = (
    SLOW
    + """
from sparsepipe.cli import main

if __name__ == "__main__":
    main()
"""
)


def tiny(root: Path, place: Path) -> list[str]:
    """A run that would take seconds if the data were good."""
    return [
        "data=modelnet10",
        f"data.root={root}",
        f"paths.data={place / 'data'}",
        f"paths.outputs={place / 'outputs'}",
        "data.cached_points=512",
        "data.num_points=256",
        "data.resolution=8",
        "data.batch_size=4",
        "data.cache_workers=1",
        "model=sparse_vgg11_bn",
        "model.width=0.05",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=2",
        "trainer.limit_test_batches=1",
    ]


def start(
    arguments: list[str],
    cwd: Path,
    *,
    most_bytes: int | None = None,
    slow: bool = False,
) -> subprocess.Popen[str]:
    """The command line; with a limit on the size of files, or reading meshes slowly."""
    how = ["-m", "sparsepipe"]
    if most_bytes is not None:
        how = ["-c", LIMITED, str(most_bytes)]
    elif slow:
        how = ["-c", SLOWLY]
    return subprocess.Popen(
        [sys.executable, *how, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
