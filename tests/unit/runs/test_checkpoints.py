"""Where checkpoints are written, and whose weights can be read."""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparsepipe import sparse
from sparsepipe.errors import CheckpointError, SparsePipeError
from sparsepipe.runs.checkpoints import DirectCheckpointIO, load_weights, read_checkpoint
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


def layers(num_classes: int = 3) -> nn.Module:
    """The names of the classifier's network, whose metrics have no tensors in checkpoints."""
    network = nn.Sequential(
        sparse.Conv3d(2, 4),
        sparse.BatchNorm(4),
        sparse.GlobalMaxPool(),
        sparse.Linear(4, num_classes),
    )
    return nn.ModuleDict({"layers": network})


def spconv(module: nn.Module, *, version: int) -> dict[str, Tensor]:
    """The weights as spconv has them; its indices are (batch, z, y, x)."""
    kernel = module.state_dict()["layers.0.kernel"]  # x fastest
    cubes = kernel.reshape(3, 3, 3, 2, 4)
    found = {"layers.0.weight": cubes.permute(4, 0, 1, 2, 3) if version == 2 else cubes}
    return {**found, **{k: v for k, v in module.state_dict().items() if k != "layers.0.kernel"}}


RENAMED: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "as it is": lambda m: dict(m.state_dict()),
    "DistributedDataParallel": lambda m: {f"module.{k}": v for k, v in m.state_dict().items()},
    "torch.compile": lambda m: {f"_orig_mod.{k}": v for k, v in m.state_dict().items()},
    "compiled layers in DDP": lambda m: {
        f"module.{k.replace('layers.', 'layers._orig_mod.')}": v for k, v in m.state_dict().items()
    },
    "bare names": lambda m: dict(m["layers"].state_dict()),
    "another front": lambda m: {
        k.replace("layers.", "model."): v for k, v in m.state_dict().items()
    },
    "spconv 2": lambda m: spconv(m, version=2),
    "spconv 1, bare and in DDP": lambda m: {
        k.replace("layers.", "module."): v for k, v in spconv(m, version=1).items()
    },
    "biases as rows": lambda m: {
        k: v[None] if k.endswith("bias") else v for k, v in m.state_dict().items()
    },
}


@pytest.mark.parametrize("kind", RENAMED)
def test_names_of_other_programs_are_recognised(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source, module = layers(), layers()
    path = tmp_path / "weights.pt"
    torch.save(RENAMED[kind](source), path)
    loaded = load_weights(module, read_checkpoint(path)["state_dict"], path)
    for name, value in source.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert loaded.complete
    assert bool(loaded.notes) == (kind not in ("as it is", "biases as rows"))
    assert ("spconv" in str(loaded)) == ("spconv" in kind)


def test_weights_of_spconv_compute_what_a_dense_convolution_does(tmp_path: Path) -> None:
    """At all sites of a full grid, with another size along each axis."""
    torch.manual_seed(0)
    dense = nn.Conv3d(2, 4, 3, padding=1, bias=False).double()  # over (z, y, x)
    weights = {"weight": dense.weight.detach().permute(0, 2, 3, 4, 1)}
    module = sparse.Conv3d(2, 4).double()
    load_weights(module, weights, tmp_path / "spconv.pt")
    coords_N3 = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(3))  # x, y, z
    feats_NC = torch.randn(60, 2, dtype=torch.float64)
    grid = torch.zeros(1, 2, 3, 4, 5, dtype=torch.float64)
    x, y, z = coords_N3.unbind(1)
    grid[0, :, z, y, x] = feats_NC.T
    expected_NC = dense(grid)[0, :, z, y, x].T
    found = module(sparse.sparse_collate([(coords_N3, feats_NC)], spatial_shape=(5, 4, 3)))
    order = {tuple(row[1:].tolist()): n for n, row in enumerate(found.coords)}
    rows = [order[tuple(row.tolist())] for row in coords_N3]
    torch.testing.assert_close(found.feats[rows], expected_NC)


def test_kernels_of_size_1_are_read_as_spconv_multiplies_by_them(tmp_path: Path) -> None:
    """In both versions by these numbers in the order of [C_in, C_out]."""
    module, numbers = sparse.Conv3d(2, 4, 1), torch.arange(8.0)
    for shape in ((1, 1, 1, 2, 4), (4, 1, 1, 1, 2)):
        nn.init.zeros_(module.kernel)
        load_weights(module, {"weight": numbers.reshape(shape)}, tmp_path / "weights.pt")
        assert torch.equal(module.kernel, numbers.reshape(1, 2, 4))


def test_another_head_is_left_out_only_where_somebody_says_so(tmp_path: Path) -> None:
    path, source, module = tmp_path / "w.pt", layers(num_classes=5), layers()
    torch.save({"model_state_dict": {**source.state_dict(), "extra": torch.ones(1)}}, path)
    weights = read_checkpoint(path)["state_dict"]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"layers\.3\.weight is \(5, 4\) in the file, \(3, 4\)"
    ) as no:
        load_weights(module, weights, path)
    assert "checkpoint_strict=false" in no.value.remedy
    loaded = load_weights(module, weights, path, strict=False)
    for name, value in module.state_dict().items():
        head = name.startswith("layers.3.")
        assert torch.equal(value, before[name] if head else source.state_dict()[name]), name
    assert str(loaded).startswith(f"{len(before) - 2} loaded, 3 skipped, 0 missing")
    states = {(row["model"], row["file"]): row["state"] for row in loaded.table()}
    assert states["", "extra"] == "skipped: not in the model"
    with pytest.raises(CheckpointError, match="another model"):
        load_weights(module, {"nothing": torch.ones(7)}, path, strict=False)


def test_a_training_says_what_it_took(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = job("trainer.max_epochs=1")
    torch.save(
        {k: v for k, v in checkpoint(first)["state_dict"].items() if not k.endswith("3.bias")},
        "w.pt",
    )
    frozen = ("optim.optimizer.lr=0", "checkpoint=w.pt")
    with pytest.raises(CheckpointError, match=r"layers\.3\.bias is missing"):
        job(*frozen)
    run = job(*frozen, "checkpoint_strict=false")
    assert "3 loaded, 0 skipped, 1 missing" in caplog.text
    table = (run / "first_weights.csv").read_text().splitlines()
    assert table[0] == "model,file,state"
    assert "layers.3.bias,,missing" in table
    weight = checkpoint(first)["state_dict"]["layers.0.weight"]
    assert torch.equal(checkpoint(run)["state_dict"]["layers.0.weight"], weight)


class Mark:
    """A pickle of it calls a function."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path("mark").touch, ()


def test_no_code_of_a_checkpoint_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "extra": Mark()}, "a.ckpt")
    with pytest.raises(CheckpointError, match="which is not read: it could run"):
        read_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "mark").exists()


class Settings:
    """Somebody's own, which a callback keeps in a checkpoint."""


def test_numbers_of_numpy_are_values(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3).T
    extra = {
        "best": np.float64(0.5),
        "epoch": np.int64(3),
        "sizes": [(array,)],
        "type": array.dtype,
    }
    torch.save({"state_dict": {}, **extra}, tmp_path / "a.ckpt")
    resumed = DirectCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    for found in (read_checkpoint(tmp_path / "a.ckpt"), resumed):
        assert (found["best"], found["epoch"], found["type"]) == (0.5, 3, array.dtype)
        assert type(found["best"]) is np.float64
        read = found["sizes"][0][0]
        assert (type(read), read.dtype.kind, read.tolist()) == (np.ndarray, "i", array.tolist())


class Makes:
    """Its pickle calls a function and fills what that has made."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


_OBJECTS = np.dtype("O")
_FIELDS = np.dtype([("a", "u1")])
_BEYOND = (3, "|", None, ("a",), {"a": (_FIELDS, 10**6)}, 1, 1, 0)


@pytest.mark.parametrize(
    "attack",
    [
        Makes(np.ndarray, ((1,), _OBJECTS, bytes(8))),
        Makes(np.ndarray, ((2**40,), np.dtype("f8"))),
        Makes(np.dtype, ("V1", False, True), _BEYOND),
        Makes(np.dtype, ("u1", False, True), _BEYOND),
        np.array([None]),
        np.zeros(2, _FIELDS),
        Makes(np.float64(0).__reduce__()[0], (np.dtype("f8"), b"")),
        Makes(*np.array([]).__reduce__()[:2], (1, (2**40,), np.dtype("f8"), False, b"")),
    ],
)  # fmt: skip
def test_no_checkpoint_reaches_other_memory(tmp_path: Path, attack: Any) -> None:
    torch.save({"state_dict": {}, "extra": attack}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"cannot be read|contains the type"):
        read_checkpoint(tmp_path / "a.ckpt")
