"""Bad data and settings as users meet them: exit code, message and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.errors import DataError
from tests.support.data_helpers import start, tiny


@pytest.mark.full
@pytest.mark.parametrize("fault", ["missing root", "truncated", "cache in a file", "full disk"])
def test_a_fault_ends_with_its_code_message_and_remedy(
    make_tree: Callable[..., Path], small_disk_or_none: Path | None, tmp_path: Path, fault: str
) -> None:
    root, disk = make_tree(2), small_disk_or_none
    (tmp_path / "file").touch()
    overrides, key = {
        "missing root": ([f"data.root={root}/nowhere"], "data.root"),
        "truncated": (["data.strict=true"], "data.strict=false"),
        "cache in a file": ([f"data.cache_dir={tmp_path}/file/cache"], "data.cache_dir"),
        "full disk": ([f"data.cache_dir={disk}", "data.cached_points=131072"], "data.cache_dir"),
    }[fault]
    if fault == "full disk" and disk is None:
        pytest.skip("mounting a tmpfs needs privileges that this process does not have")
    if fault == "truncated":
        (root / "box" / "train" / "box_0000.off").write_text("OFF\n8 12 0\n0 0 0\n1 1 1\n")
    process = start([*tiny(root, tmp_path / "place"), *overrides], tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == DataError.exit_code, errors
    assert key in errors.partition("remedy:")[2]
    assert "Traceback" not in errors
