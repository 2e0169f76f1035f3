"""Where checkpoints are written."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import SparsePipeError
from tests.support.command_line import checkpoint, files_limited_to

Job = Callable[..., Path]


def test_a_full_temporary_directory_does_not_matter(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    assert checkpoint(job())["callbacks"]["RunCheckpoint"]["epoch"] == 2


def test_a_checkpoint_that_does_not_fit_is_not_left_behind(job: Job) -> None:
    with files_limited_to(200_000), pytest.raises(SparsePipeError, match="cannot be written"):
        job("model.width=20000")
    (run,) = Path("outputs/tiny").glob("[!.]*")
    assert not [path for path in (run / "checkpoints").glob("*") if "ckpt" in path.name]
