"""Reading and writing checkpoints, with messages for those that do not fit."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from typing_extensions import override

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import CheckpointError
from sparsepipe.runs.rundir import RunDir, file_fingerprint
from sparsepipe.utils.files import expanded

_SHOWN = 3


def find_checkpoint(source: str) -> Path:
    """The checkpoint file of a path: itself, or the last one of a run directory. Raises a
    CheckpointError without one.
    """
    path = expanded(source)
    for candidate in (path, RunDir(path).last):
        if candidate.is_file():
            return candidate.absolute()
    raise CheckpointError(
        f"there is no checkpoint at {path}",
        remedy="give a .ckpt file, or the directory of a run that has finished an epoch",
    )


def first_weights(spec: RunSpec) -> dict[str, str]:
    """The entry of ``result.json`` with the file of the first weights, if any."""
    named = spec.checkpoint
    return {} if named is None else {"first_weights": file_fingerprint(find_checkpoint(named))}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU.

    Raises:
        CheckpointError: it is broken, or no checkpoint of a module.
    """
    try:
        value = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {reason}",
            remedy="remove it if it was cut off; a run with force=true starts anew",
        ) from error
    if not isinstance(value, dict) or not isinstance(value.get("state_dict"), Mapping):
        raise CheckpointError(
            f"{path} holds no 'state_dict'", remedy="give a checkpoint that Lightning wrote"
        )
    return value


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Loads weights into a module of the same names and shapes.

    Raises:
        CheckpointError: they are another model's; says where they differ first.
    """
    own = module.state_dict()
    differences = [
        *(f"{name} is missing in it" for name in own if name not in weights),
        *(f"it has {name}, the model has not" for name in weights if name not in own),
        *(
            f"{name} is {tuple(weights[name].shape)} there, {tuple(value.shape)} in the model"
            for name, value in own.items()
            if name in weights and weights[name].shape != value.shape
        ),
    ]
    if differences:
        shown = "; ".join(differences[:_SHOWN])
        more = len(differences) - _SHOWN
        config = RunDir(source.parent.parent).config
        hint = f", as in {config}" if config.is_file() else ""
        raise CheckpointError(
            f"{source} is of another model: {shown}" + (f"; and {more} more" if more > 0 else ""),
            remedy=f"choose the model, its width and the data it was trained with{hint}",
        )
    module.load_state_dict(dict(weights))


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to the given path and nowhere else.

    Lightning's own goes by way of the system's temporary directory, which may be small or
    full where the run's is not.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        # In memory first: given a file, torch hides the disk's error behind its own.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with place.open("wb") as stream:
                stream.write(content.getbuffer())
        except OSError:
            with suppress(OSError):
                place.unlink(missing_ok=True)
            raise
