"""Random generators of a process: their seeds, their states, and draws that leave them alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.random_generators import (
    NUMPY,
    PYTHON,
    Generator,
    states_of,
    states_preserved,
    swap_states,
)

GLOBAL: tuple[Generator, ...] = (torch.default_generator, NUMPY, PYTHON)
"""The global generators of the host, from which samplers and data sets draw."""


def mixed(*numbers: int) -> int:
    """One seed from several numbers, different for each combination."""
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_model(seed: int) -> None:
    """Seeds all generators alike on every rank, before the model is built."""
    pl.seed_everything(seed, workers=True, verbose=False)


def seed_epoch(seed: int, epoch: int) -> None:
    """Seeds torch for an epoch, differently on ranks that read different samples."""
    torch.manual_seed(mixed(seed, epoch, process_group.reader()))


def seed_generators(generators: Iterable[Generator], seed: int) -> None:
    """Seeds generators of any kind."""
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            kind: Any = type(generator.bit_generator)
            generator.bit_generator.state = kind(seed).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed % 2**32)
        else:
            generator.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, the global generators begin with a seed; afterwards they are as they were before."""
    with states_preserved(GLOBAL):
        seed_generators(GLOBAL, seed)
        yield


class SeparateDraws:
    """A state of the global generators that only what runs within :meth:`drawing` sees and changes.

    Args:
        seed: of numpy and python.
        torch_seed: of torch.
    """

    def __init__(self, seed: int, *, torch_seed: int) -> None:
        with seeded(seed):
            torch.default_generator.manual_seed(torch_seed)
            self._states = list(
                zip(GLOBAL, states_of(dict(enumerate(GLOBAL))).values(), strict=True)
            )

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within, draws continue where the previous block ended."""
        replaced = swap_states(self._states)
        try:
            yield
        finally:
            self._states = swap_states(replaced)


def get_randomness() -> dict[str, Any]:
    """State of this process's random generators, as values a checkpoint may hold."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def set_randomness(state: dict[str, Any]) -> None:
    """Sets what :func:`get_randomness` read."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])
