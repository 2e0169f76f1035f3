"""Checkpoints written straight to their place."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to the path that is asked for and nowhere else.

    Lightning's own goes by way of the system's temporary directory, which may be small or
    full where the run's is not.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        # In memory first: given a file, torch hides what the disk says behind its own error.
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
