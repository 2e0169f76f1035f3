"""Notices what a step collects in its module: only ranks of the last stage will have it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl


class Keeping:
    """Warns of attributes of a module that grow in a step.

    Hooks at an epoch's end run on every rank, and find them empty on most.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._ignored = vars(pl.LightningModule()).keys()
        self._seen: set[str] = set()

    @contextmanager
    def noticing(self, hook: str) -> Iterator[None]:
        """Around a step; looks at the first of each kind.

        Args:
            hook: the step's name.
        """
        if hook in self._seen or self._module.trainer.world_size == 1:
            yield
            return
        self._seen.add(hook)
        before = self._sizes()
        yield
        grown = [name for name, size in self._sizes().items() if size > before.get(name, 0)]
        if grown:
            names = ", ".join(f"self.{name}" for name in grown)
            warnings.warn(
                f"{type(self._module).__name__}.{hook} adds to {names}, and only ranks of the "
                "last stage see it: elsewhere it stays empty. What is wanted at the epoch's end "
                "goes into self.log or a torchmetric, which every rank has.",
                stacklevel=2,
            )

    def _sizes(self) -> dict[str, int]:
        return {
            name: len(value)
            for name, value in vars(self._module).items()
            if isinstance(value, list | dict | set) and name not in self._ignored
        }
