"""Logging to stderr, since the last line of stdout must be the run directory."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from sparsepipe.utils.progress import SILENCE

_NOISE = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    ".*ended before the epoch ended and your dataloader is not resumable.*",
    ".*`Trainer.fit` will load.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*isinstance.treespec, LeafSpec.*",
    ".*no `val_dataloader`.*",
    ".*It is recommended to use `self.log.*sync_dist=True.*",
    ".*`srun` command is available.*",
    ".*Total length of .* across ranks is zero.*",
)


class _Stderr(logging.Handler):
    """Writes to the present ``sys.stderr``, which progress bars replace; restarts ``SILENCE``."""

    def emit(self, record: logging.LogRecord) -> None:
        SILENCE.broken()
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def configure() -> None:
    """Sends this package's log messages to stderr; of ranks other than 0, only warnings."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("[sparsepipe] %(message)s"))
    package = logging.getLogger("sparsepipe")
    package.handlers[:] = [handler]
    package.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    package.propagate = False


def quiet() -> None:
    """Silences messages of other libraries about settings that this package chooses itself."""
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
