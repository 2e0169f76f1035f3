"""Spatial parallelism: each sample is cut over a grid of ranks; each grid reads its own batches.

A LightningModule is written as for one device. In its hooks a batch's tensors are shards
(:class:`sparsepipe.spatial.Shard`) that report the shapes of whole samples, and losses are those of
whole samples. All ranks of a grid compute the same loss, so that DDP's mean of the gradients of all
ranks is the gradient of that loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric
from typing_extensions import override

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.missing_ranks import collective
from sparsepipe.spatial.grid import Grid, best_grid
from sparsepipe.spatial.shard import Shard, gathered
from sparsepipe.spatial.spatialize import spatialize_layers, unspatialize
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.data_parallel import DataParallelStrategy
from sparsepipe.strategies.gradients import PartGradients
from sparsepipe.strategies.sample_shards import SampleShards, stage_of

log = logging.getLogger(__name__)


class SpatialStrategy(DataParallelStrategy):
    """Cuts each sample over a grid of ranks.

    All ranks of a grid read the same batches, of which each keeps its shard; a data set with
    ``sample_sizes`` and ``read_part`` reads no more than that. The samples are a batch's first
    tensor with a batch and a channel dimension before those of the grid. Tensors with their
    spatial sizes, such as voxel labels, are cut as well; all else is the same on a grid's ranks.

    Args:
        grid: number of shards along each of the last dimensions; ``auto``: the grid that exchanges
            the fewest bytes for samples of the data module's ``sample_sizes``.
        replicas: number of grids, each of which reads its own batches.
        overlap: whether to compute what needs no halo while halos are under way.
        gather_predictions: whether every rank gets whole predictions; otherwise they are shards,
            for :class:`sparsepipe.callbacks.WriteShards`.

    Other arguments are those of :class:`DataParallelStrategy`.

    Attributes:
        grid: the grid of ranks that share this rank's samples, while a Trainer runs.

    Raises:
        ConfigError: when a Trainer starts, the product of grid and replicas is not the number of
            ranks, or a layer cannot compute with shards.
    """

    strategy_name = "sparsepipe_spatial"
    grid: Grid

    def __init__(
        self,
        *,
        grid: Sequence[int] | Literal["auto"] = "auto",
        replicas: int = 1,
        timeout_s: float = 300.0,
        process_group_backend: str | None = None,
        overlap: bool = True,
        gather_predictions: bool = True,
        find_unused_parameters: bool = False,
        slowdown: float = 1.0,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        super().__init__(
            timeout_s=timeout_s,
            process_group_backend=process_group_backend,
            find_unused_parameters=find_unused_parameters,
            slowdown=slowdown,
            cluster_environment=cluster_environment,
        )
        self._shape = None if grid == "auto" else tuple(grid)
        self._replicas = replicas
        self._averages_buffers = replicas > 1  # those of one grid are equal
        self._overlap = overlap
        self.gather_predictions = gather_predictions
        self._shards: SampleShards | None = None
        self._alone: list[Tensor] = []  # parameters whose gradients DDP does not add up
        self._gradients: PartGradients | None = None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        replica = self.global_rank // max(self.world_size // self._replicas, 1)
        return {"num_replicas": self._replicas, "rank": replica}

    @override
    def setup_distributed(self) -> None:
        with isolate_rng():  # random draws continue as on one device
            super().setup_distributed()
        check_grid(self._shape or "auto", replicas=self._replicas, ranks=self.world_size)
        size = self.world_size // self._replicas
        process_group.ranks_per_sample = size
        # The group of this rank's grid, and that of the ranks in the same place of all grids. The
        # first is a separate group even if it has all ranks: DDP sends messages in between halos.
        grids = [range(first, first + size) for first in range(0, self.world_size, size)]
        places = [range(place, self.world_size, size) for place in range(size)]
        options: dict[str, Any] = {
            "backend": internals.resolve_process_group_backend(self),
            "timeout_s": self._timeout_s,
        }
        self._groups = [process_group.make_stage_group(each, **options) for each in (grids, places)]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if internals.synchronises_batch_norm(self):
            raise ConfigError(
                "trainer.sync_batchnorm=true cannot be combined with samples cut over a grid",
                remedy="leave it out: batch norms already normalise over the grid's whole batch",
            )
        if internals.is_compiled(module):
            raise ConfigError(
                f"{type(module).__name__} is compiled as a whole, so its layers cannot be replaced "
                "by rules for shards",
                remedy="train the module that it was compiled from",
            )
        shape = self._shape
        if shape is None:
            sizes = getattr(getattr(trainer, "datamodule", None), "sample_sizes", None)
            if sizes is None:
                raise ConfigError(
                    "grid=auto chooses by the size of samples, but the data module has no "
                    "sample_sizes",
                    remedy="give the grid, such as [1, 2], or a data module with sample_sizes",
                )
            shape = best_grid(tuple(sizes), self.world_size // self._replicas)
            if self.global_rank == 0:
                log.info(
                    "grid %s exchanges the fewest bytes for samples of %s", shape, tuple(sizes)
                )
        self.grid = Grid(shape, self._groups[0], overlap=self._overlap)
        self._shards = SampleShards(self.grid, self.root_device)
        if self._replicas == 1:
            self.keep_samplers(trainer)
        spatialize_layers(module, self.grid)
        for metric in module.modules():  # count each sample once: all ranks of a grid count it
            if isinstance(metric, Metric):
                for name in ("process_group", "distributed_available_fn"):
                    self._on_teardown.callback(setattr, metric, name, getattr(metric, name))
                metric.process_group = self._groups[1]
                if self._replicas == 1:
                    metric.distributed_available_fn = lambda: False
        super().setup(trainer)
        # DDP ignores parameters that are frozen when training begins, and those outside the module.
        reduced = {id(each) for each in module.parameters() if each.requires_grad}
        self._alone = [each for each in self._trained(module) if id(each) not in reduced]
        if self.grid.size > 1:
            self._gradients = PartGradients(module, lambda: self._trained(module), self.grid)
            self._on_teardown.enter_context(self._gradients.watched())

    def _trained(self, module: pl.LightningModule) -> list[Tensor]:
        """Returns the parameters of the module, and others that an optimizer updates."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        others = (each for group in groups for each in group["params"])
        return list({id(each): each for each in (*module.parameters(), *others)}.values())

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(reduce_op, str) or group is not None:
            return super().reduce(tensor, group, reduce_op)  # on which all ranks must agree
        if self._replicas == 1:
            return tensor
        return super().reduce(tensor, self._groups[1] if self._groups else None, reduce_op)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Returns the loader; its data set, if it can read parts, now reads this rank's shards."""
        assert self._shards is not None
        self._shards.read(dataloader, stage_of(self.lightning_module))
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        assert self._shards is not None
        cut = self._shards.cut(batch, stage_of(self.lightning_module))
        return super().batch_to_device(cut, device, dataloader_idx)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().predict_step(*args, **kwargs)
        return pytree.tree_map_only(Shard, gathered, found) if self.gather_predictions else found

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        if self._gradients is not None and self._gradients.seen():
            return nullcontext()
        return super().block_backward_sync()

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        # DDP's own reduction would not name a missing rank.
        with collective("adding up gradients"):
            if self._gradients is None:
                return super().backward(*args, **kwargs)
            with self._gradients.finished_by(self._add_up_others):
                return super().backward(*args, **kwargs)

    def _add_up_others(self) -> None:
        found = [each.grad for each in self._alone if each.grad is not None]
        if found and getattr(self.model, "require_backward_grad_sync", True):
            process_group.average_(found)

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            unspatialize(self.lightning_module)
        if self._shards is not None:
            self._shards.restore()
            self._shards = None
        self._alone.clear()
        self._gradients = None
        for group in self._groups:
            process_group.destroy_group(group)
        self._groups.clear()
        vars(self).pop("grid", None)  # its group has threads
        super().teardown()


def check_grid(grid: Sequence[int] | Literal["auto"], *, replicas: int, ranks: int) -> None:
    """Raises a ConfigError unless ``replicas`` grids, of several ranks each, use all ranks."""
    size = None if grid == "auto" else math.prod(map(int, grid))
    text = "a grid" if grid == "auto" else f"a grid of {' x '.join(map(str, grid))}"
    if replicas < 1 or ranks % replicas or size not in (None, ranks // replicas):
        raise ConfigError(
            f"{text} with replicas={replicas} does not fit the number of ranks, {ranks}",
            remedy="make the product of the grid's shards and replicas the number of devices",
        )
    if ranks == replicas and ranks > 1:
        raise ConfigError(
            f"replicas={replicas} leaves only one rank for each grid",
            remedy="use fewer replicas, or choose data parallelism: parallel=dp",
        )


StrategyRegistry.register(
    SpatialStrategy.strategy_name,
    SpatialStrategy,
    description="each sample cut over a grid of ranks, which exchange halos",
)
