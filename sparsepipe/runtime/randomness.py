"""Random draws that belong to a minibatch and a layer, wherever the layer runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRandomness:
    """Seeds torch's generators for each layer, so that a run does not depend on its plan.

    Args:
        seed: of the run.
        device: where the layers run; its generator is seeded as well as the host's.
    """

    seed: int
    device: torch.device = _HOST

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Inside, layers may be keyed; afterwards the generators are as they were before."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            yield

    def key(self, *, minibatch: int, layer: int) -> None:
        """What is drawn next belongs to this layer.

        Args:
            minibatch: number in the whole run.
            layer: number in the Sequential.
        """
        text = f"{self.seed} {minibatch} {layer}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
