"""Cuts batches into shards for a grid of ranks, each of which reads whole samples or its shards."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import RunningStage
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import safe_pickle
from sparsepipe.runtime.collectives.halo import gather_numbers
from sparsepipe.runtime.random_generators import (
    NUMPY,
    PYTHON,
    Generator,
    is_generator,
    set_states,
    states_of,
)
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.shard import shard_of
from sparsepipe.spatial.spatialize import has_sizes, sample_sizes

_COMPARED = 4099
"""Approximate number of elements of each tensor that ranks compare."""


def stage_of(module: pl.LightningModule | None) -> str:
    """Returns the Trainer's running stage, such as "train"; a sanity check counts as "validate"."""
    assert module is not None
    stage = module.trainer.state.stage
    return str(RunningStage.VALIDATING if stage == RunningStage.SANITY_CHECKING else stage)


class SampleShards:
    """Cuts batches over a grid, and makes data sets read only this rank's shards if they can."""

    def __init__(self, grid: Grid, device: torch.device) -> None:
        self._grid, self._device = grid, device
        self._gather = partial(
            gather_numbers, group=grid.group, device=device, what="comparing batches"
        )
        self._parts: dict[str, tuple[int, ...] | None] = {}  # by stage: sizes if read in parts
        self._restoring = ExitStack()

    def read(self, loader: object, stage: str) -> None:
        """Makes a loader's data set read only this rank's part of each sample, if it can.

        A grid's ranks then iterate over a DataLoader from the same states of random generators.
        """
        if isinstance(loader, DataLoader) and not hasattr(loader, "shares_draws"):
            kind = type(loader)

            @wraps(kind.__iter__)
            def begin(loader: DataLoader[Any]) -> Any:
                caller: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
                if caller.f_globals["__name__"].startswith(("pytorch_lightning.", "sparsepipe.")):
                    self._share_draws(loader)
                return kind.__iter__(loader)

            attributes = {"__iter__": begin, "shares_draws": True}
            loader.__class__ = type(kind.__name__, (kind,), attributes)
            # A class is freed late, and the grid's group has threads.
            self._restoring.callback(delattr, loader.__class__, "__iter__")
            self._restoring.callback(setattr, loader, "__class__", kind)
        data: Any = getattr(loader, "dataset", None)
        readable = hasattr(data, "sample_sizes") and hasattr(data, "read_part")
        sizes = tuple(data.sample_sizes) if readable else None
        if self._parts.setdefault(stage, sizes) != sizes:
            raise ConfigError(
                f"the {stage} loaders differ in the sizes of their samples, or in whether they can "
                "read parts of them",
                remedy="use data sets of the same kind and sample size",
            )
        if sizes is not None:
            self._grid.check(sizes)
            held = (self._grid.held(axis, size) for axis, size in enumerate(sizes))
            data.read_part(tuple(slice(each.start, each.stop) for each in held))
            self._restoring.callback(data.read_part, tuple(slice(0, size) for size in sizes))

    def cut(self, batch: Any, stage: str) -> Any:
        """Returns the batch with its samples, and other tensors of their sizes, as shards."""
        grid, read_in_parts = self._grid, self._parts.get(stage)
        sizes = sample_sizes(batch, grid)
        leaves, spec = pytree.tree_flatten(batch)
        plain = [leaf for leaf in leaves if type(leaf) is Tensor]
        parts = [leaf for leaf in plain if read_in_parts and has_sizes(leaf, sizes)]
        whole = [leaf for leaf in plain if not (read_in_parts and has_sizes(leaf, sizes))]
        if read_in_parts and not whole:
            raise ConfigError(
                "a batch whose samples are read in parts does not tell which samples it has",
                remedy="add their indices in the data set to the batch, as 'index'",
            )
        # All must have read the same: they compare shapes, dtypes, and some elements of what is
        # whole; and if their random states differ, all take rank 0's.
        shapes = [tuple(leaf.shape[: -grid.dimensions]) for leaf in parts]
        digest = zlib.crc32(str(shapes).encode())
        for tensor in whole:
            digest = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
            flat = tensor.detach().flatten()
            # A copy, since a tensor of one element is contiguous whatever its stride.
            some = flat[:: max(1, len(flat) // _COMPARED)].cpu()
            some = some.clone(memory_format=torch.contiguous_format)
            digest = zlib.crc32(some.view(torch.uint8).numpy().data, digest)
        generators: dict[str, Generator] = {"host": torch.default_generator}  # dropout's
        if self._device.type == "cuda":
            generators["device"] = torch.cuda.default_generators[self._device.index or 0]
        self._share(generators, digest)
        dims, full = range(-grid.dimensions, 0), read_in_parts or sizes
        for number, leaf in enumerate(leaves):
            if has_sizes(leaf, sizes):
                # A copy, so that the whole batch does not stay in memory.
                local = leaf if read_in_parts else grid.shard(leaf).clone()
                leaves[number] = shard_of(local, grid, dims, full)
        return pytree.tree_unflatten(leaves, spec)

    def _share_draws(self, loader: DataLoader[Any]) -> None:
        """Sets the generators from which samplers may draw to the states of the grid's rank 0."""
        generators: dict[str, Generator] = {"torch": torch.default_generator}
        generators |= {"numpy": NUMPY, "python": PYTHON}
        batches = loader.batch_sampler
        owners = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
        for number, owner in enumerate(owners):
            own = getattr(owner, "__dict__", {}).items()
            generators |= {f"{number} {name}": each for name, each in own if is_generator(each)}
        self._share(generators)

    def _share(self, generators: Mapping[str, Generator], digest: int = 0) -> None:
        """Sets generators to rank 0's states if a rank drew on its own, say in a callback."""
        packed = safe_pickle.dumps(states_of(generators))
        known = self._gather([zlib.crc32(packed), len(packed), digest])
        if len({each for *_, each in known}) > 1:
            raise ConfigError(
                "ranks that share samples have read different batches",
                remedy="make a batch depend only on the seed, the epoch and its number; give your "
                "own sampler the arguments in Trainer.distributed_sampler_kwargs",
            )
        if len(set(known)) > 1:
            first = self._gather(list(packed.ljust(max(size for _, size, _ in known))))[0]
            states = safe_pickle.loads(bytes(first[: known[0][1]]))
            set_states((generators[name], state) for name, state in states.items())

    def restore(self) -> None:
        """Makes data sets read whole samples again, and loaders draw on their own."""
        self._restoring.close()
