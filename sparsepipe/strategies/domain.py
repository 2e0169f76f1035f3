"""Domain parallelism: domains, with their private encoders and loaders, are spread over ranks.

A LightningModule is written as for one device, like :class:`sparsepipe.models.DomainSeparation`.
Its domains exchange data through the object given to its method ``use``, which the strategy calls.
While a Trainer runs, each rank frees the private parameters of other ranks' domains.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from sparsepipe.domains.exchange import OneGrid, OneLossRank, Ranks, SharedLosses
from sparsepipe.domains.placement import Placement, Roles
from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.process_group import broadcast_tensors_
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.shard import Shard, gathered
from sparsepipe.spatial.spatialize import spatialize_layers, unspatialize
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.distributed import RankedStrategy, RankEnvironment
from sparsepipe.strategies.gradients import PartGradients
from sparsepipe.strategies.sample_shards import SampleShards, stage_of
from sparsepipe.strategies.sharding import (
    ModulePart,
    ShardedCheckpoints,
    ShardedModule,
    clipping_by_norm,
)

log = logging.getLogger(__name__)


class OwnDomains(ModulePart):
    """A rank's part of a module: what all domains share, and what is private to its own domains."""

    def __init__(
        self, module: pl.LightningModule, placement: Placement, rank: int, grid_size: int
    ) -> None:
        self._module, self._placement = module, placement
        self._unit, self._grid_size = rank // grid_size, grid_size
        self.domains: Mapping[str, str] = module.parts_of_domains  # type: ignore[assignment]
        self._emptied: dict[str, torch.Size] = {}

    def holds(self, name: str) -> bool:
        """Returns whether this rank holds the parameter or buffer called ``name``."""
        domain = self.domains.get(name)
        return domain is None or self._unit in self._placement.ranks_of(domain)

    def source(self, name: str) -> int:
        """Returns the first rank that trains the parameter, or updates the buffer, ``name``."""
        unit, last = 0, self._placement.loss_rank
        if (domain := self.domains.get(name)) is not None:
            unit = self._placement.ranks_of(domain)[0]
        elif last is not None and ".shared." not in f".{name}":  # not in the shared encoder
            unit = last
        return unit * self._grid_size

    silent = nullcontext
    """Context in which SparsePipe's own code may read parameters; here, any code always may."""

    @torch.no_grad()
    def prune(self) -> None:
        """Frees the private parameters and buffers of other ranks' domains."""
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if not self.holds(name):
                self._emptied[name] = tensor.shape
                tensor.data = tensor.data.new_empty(0)

    @torch.no_grad()
    def unprune(self) -> None:
        """Allocates what :meth:`prune` freed; its values are NaN, or 0 where they are integers."""
        # By name, since moving a module to a device replaces its buffers.
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if (shape := self._emptied.get(name)) is not None:
                none = float("nan") if tensor.is_floating_point() else 0
                tensor.data = tensor.data.new_full(shape, none)
        self._emptied.clear()


class DomainStrategy(ShardedCheckpoints, RankedStrategy):
    """Trains a domain separation network whose domains are spread over ranks.

    With as many ranks as domains, each rank has one; with fewer, ranks have several; with more,
    domains have replicas, which share their samples as in data parallelism. On each rank, the data
    module's batches must have only the domains in ``trainer.strategy.domains``. With a ``grid``,
    its ranks share each sample (:mod:`sparsepipe.spatial`); then "rank" here means a whole grid.

    Args:
        roles: ``equal``: every rank gathers the codes of all ranks and computes the losses.
            ``separate``: the last rank has no domain, but decoder, head, discriminator and losses
            (Tsaris and Hinkle, Multi-DSN).
        grid: number of shards along each of the last dimensions of samples; None: whole samples.

    Other arguments are those of :class:`sparsepipe.strategies.DataParallelStrategy`.

    Attributes:
        placement: which rank (or grid of ranks) has which domains; None before a Trainer runs.
        domains: names of this rank's domains; None before a Trainer runs.

    Raises:
        ConfigError: when a Trainer starts, the module has no domains, or there are too few ranks
            for the roles, or not a multiple of the grid's.
    """

    strategy_name = "sparsepipe_domain"

    def __init__(
        self,
        *,
        roles: Roles = "equal",
        grid: Sequence[int] | None = None,
        timeout_s: float = 300.0,
        process_group_backend: str | None = None,
        slowdown: float = 1.0,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        super().__init__(
            slowdown=slowdown,
            cluster_environment=cluster_environment or RankEnvironment(),
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
        )
        if roles not in ("equal", "separate"):
            raise ConfigError(f"roles={roles!r} is not valid", remedy="choose equal or separate")
        self._roles: Roles = roles
        self._shape = None if grid is None else tuple(grid)
        self._size = math.prod(self._shape or (1,))  # number of ranks that share a sample
        self._unit = 0  # this rank, or the index of its grid
        self.domains: tuple[str, ...] | None = None
        self._shards: SampleShards | None = None
        self.placement: Placement | None = None
        self._ranks: Ranks | None = None
        self._averages: list[tuple[Replicas, dict[str, nn.Parameter]]] = []
        self._waits_for_more = False
        self._gradients: PartGradients | None = None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.placement is None:
            return {"num_replicas": 1, "rank": 0}
        replica, replicas = self.placement.replica(self._unit)
        return {"num_replicas": replicas, "rank": replica}

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self.join()
        super().setup_distributed()
        module = self.lightning_module
        assert module is not None
        wanted = ("domains", "use", "parts_of_domains")
        if missing := [name for name in wanted if not hasattr(module, name)]:
            raise ConfigError(
                f"{type(module).__name__} has no attribute {missing[0]!r}, so its domains cannot "
                "be spread over ranks",
                remedy="choose a model with domains (model=dsn_2d, dsn_3d or dsn_sparse), or "
                "another strategy",
            )
        if self.world_size % self._size:
            raise ConfigError(
                f"the number of ranks is {self.world_size}, not a multiple of the {self._size} "
                f"that a grid of {' x '.join(map(str, self._shape or ()))} needs",
                remedy=f"set the number of devices to a multiple of {self._size}",
            )
        units = self.world_size // self._size
        self.placement = Placement(tuple(module.domains), units, self._roles)  # type: ignore[arg-type]
        self._unit = self.global_rank // self._size
        self.domains = self.placement.domains_of(self._unit)
        process_group.ranks_per_sample = self._size
        if self.global_rank == 0:
            what = "rank" if self._size == 1 else "grid"
            for unit in range(units):
                names = ", ".join(self.placement.domains_of(unit)) or "the losses"
                log.info("%s %d: %s", what, unit, names)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_trainer(trainer, synchronises_norm=internals.synchronises_batch_norm(self))
        internals.disable_signal_broadcast(trainer)
        self.precision_plugin.convert_module(module)
        placement = self.placement
        assert placement is not None
        if placement.replica(self._unit)[1] == 1:
            self.keep_samplers(trainer)
        grid = None
        if self._shape is not None:  # before schedulers, which ask how many batches loaders have
            grids = [[each] for each in range(placement.ranks)]
            grid = Grid(self._shape, self._group(grids))
            self._shards = SampleShards(grid, self.root_device)
        if fitting:
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise ConfigError(
                    f"configure_optimizers returns {len(self.optimizers)} optimizers, but domain "
                    "parallelism needs exactly one",
                    remedy="return one optimizer, with parameter groups where options differ",
                )
        optimizer = self.optimizers[0] if fitting else None
        part = OwnDomains(module, placement, self.global_rank, self._size)
        self._sharded = ShardedModule(module, part=part, rank=self.global_rank, optimizer=optimizer)
        self.model_to_device()
        self.setup_precision_plugin()
        if fitting:
            internals.move_optimizer(self.optimizers[0], self.root_device)
        if grid is not None:
            spatialize_layers(module, grid)
        self._connect(module, part, placement, fitting=fitting)
        if fitting and self.world_size > 1:
            grid = grid if placement.ranks == 1 else None  # which all compute the same losses
            self._gradients = PartGradients(module, module.parameters, grid)
            self._on_teardown.enter_context(self._gradients.watched())

    def _connect(
        self, module: pl.LightningModule, part: OwnDomains, placement: Placement, *, fitting: bool
    ) -> None:
        """Makes process groups, the module's exchange of codes, and the averages of gradients."""
        unit, encoders, last = self._unit, range(placement.encoders), placement.loss_rank
        replicas = [placement.ranks_of(name) for name in placement.domains]
        self._ranks = Ranks(
            placement=placement,
            rank=unit,
            group=self._group([range(placement.ranks)], by_place=True),
            encoders=self._group([encoders], by_place=True),
            replicas=self._group(replicas, by_place=True),
            whole=lambda value: gathered(value) if isinstance(value, Shard) else value,
        )
        if self.world_size > 1:
            exchange = SharedLosses if last is None else OneLossRank
            made = OneGrid(self._ranks) if placement.ranks == 1 else exchange(self._ranks)
            module.use(made)  # type: ignore[operator]
        sharing = self._group([encoders])
        losing = None if last is None else self._group([[last]])
        of_domains = self._group(replicas)
        if not fitting:
            return
        shared, own = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
        is_encoder = unit < placement.encoders
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or not part.holds(name):
                continue
            if name in part.domains:
                own[name] = parameter
            elif last is None or (".shared." in f".{name}") == is_encoder:
                shared[name] = parameter
        group = sharing if is_encoder else losing
        self._averages = [(Replicas(group, shared), shared), (Replicas(of_domains, own), own)]

    def _group(self, units: Iterable[Iterable[int]], *, by_place: bool = False) -> Any:
        """Makes a process group of each set in ``units`` (indices of ranks, or of grids of ranks);
        returns this rank's group, or None if it would have no other rank.

        ``by_place``: from a set of grids, makes a group for each place in a grid, with the rank at
        that place of every grid, since these ranks exchange codes.
        """
        size, groups = self._size, []
        for each in (list(each) for each in units):
            places = [[unit * size + place for unit in each] for place in range(size)]
            ranks = [unit * size + place for unit in each for place in range(size)]
            groups += places if by_place else [ranks]
        backend = internals.resolve_process_group_backend(self)
        found = process_group.make_stage_group(groups, backend=backend, timeout_s=self._timeout_s)
        self._groups.append(found)
        return found

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Returns the loader; its data set, if it can read parts, now reads this rank's shards."""
        data = getattr(dataloader, "dataset", None)
        is_empty = isinstance(data, list) and not any(data)  # minibatches without domains
        if self._shards is not None and not is_empty:
            in_turn = getattr(dataloader, "loaders", None)  # of an evaluation, by domain
            for each in [dataloader] if in_turn is None else in_turn.values():
                self._shards.read(each, stage_of(self.lightning_module))
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        stage = stage_of(self.lightning_module)
        of_one_domain = isinstance(batch.get("domain"), str)  # in an evaluation
        if not of_one_domain:
            batch = {name: each for name, each in batch.items() if each}
        if self._shards is not None:
            if of_one_domain:
                batch = self._shards.cut(batch, stage)
            else:
                batch = {name: self._shards.cut(each, stage) for name, each in batch.items()}
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        """Checks that the ranks, which exchange codes in each step, have equally many steps."""
        assert self.lightning_module is not None
        own = self.lightning_module.trainer.num_training_batches
        lengths = process_group.gather_objects(own, what="comparing the lengths of loaders")
        if len({*lengths}) > 1:
            raise ConfigError(
                f"the ranks' training loaders have {', '.join(map(str, lengths))} batches, but "
                "domains that are spread over ranks need equally many on all",
                remedy="give every rank's longest loader the same number of batches, as the data "
                "modules of sparsepipe.data do, or set trainer.limit_train_batches",
            )

    @override
    def configure_ddp(self) -> None:
        """Does nothing: this strategy averages gradients itself."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context in which gradients add up on each rank; the next backward pass averages them."""
        self._waits_for_more = self._gradients is None or not self._gradients.seen()
        try:
            yield
        finally:
            self._waits_for_more = False

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        if self._gradients is None:
            return super().backward(*args, **kwargs)
        with self._gradients.finished_by(self._average):
            return super().backward(*args, **kwargs)

    @torch.no_grad()
    def _average(self) -> None:
        """Averages the ranks' gradients, unless more of them follow before an update."""
        for replicas, parameters in () if self._waits_for_more else self._averages:
            gradients = {name: each.grad for name, each in parameters.items()}
            for name, gradient in replicas.average(gradients).items():
                parameter = parameters[name]
                if gradient is None or parameter.grad is None:
                    parameter.grad = None if gradient is None else gradient.clone()
                else:
                    parameter.grad.copy_(gradient)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        clipping: AbstractContextManager[None] = nullcontext()
        if self._sharded is not None and self.world_size > 1:
            clipping = clipping_by_norm(self.precision_plugin, self._sharded.norm.clip)
        with clipping:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def on_validation_start(self) -> None:
        """Broadcasts shared parameters and buffers from ranks that train them, unless all do."""
        module, placement = self.lightning_module, self.placement
        assert module is not None
        assert placement is not None
        if (last := placement.loss_rank) is None:
            return
        assert self._sharded is not None
        part = self._sharded.part
        named = [*module.named_parameters(), *module.named_buffers()]
        shared = [(name, each) for name, each in named if name not in part.domains]
        for source in (0, last * self._size):
            broadcast_tensors_(
                [each for name, each in shared if part.source(name) == source], source=source
            )

    on_test_start = on_predict_start = on_validation_start

    @override
    def teardown(self) -> None:
        module, sharded = self.lightning_module, self._sharded
        failed = internals.run_failed(module)
        if sharded is not None:
            sharded.part.unprune()
        super().teardown()
        if sharded is not None and not failed:
            sharded.fill()
        if module is not None and self._ranks is not None:
            module.use()  # type: ignore[operator]
            unspatialize(module)
        if self._shards is not None:
            self._shards.restore()
            self._shards = None
        for group in self._groups:
            process_group.destroy_group(group)
        self._groups.clear()
        self._averages.clear()
        self._sharded = self._ranks = self._gradients = None


def check_trainer(trainer: pl.Trainer, *, synchronises_norm: bool) -> None:
    if synchronises_norm:
        raise ConfigError(
            "trainer.sync_batchnorm=true cannot be combined with domain parallelism",
            remedy="set trainer.sync_batchnorm=false; model.norm=all normalises over all domains, "
            "model.norm=domain over each",
        )
    if str(trainer.precision) in ("16-mixed", "16"):
        raise ConfigError(
            f"precision={trainer.precision} scales the loss on each rank by a factor of its own, "
            "but domain parallelism needs the same on all",
            remedy="choose bf16-mixed or 32-true",
        )


StrategyRegistry.register(
    DomainStrategy.strategy_name,
    DomainStrategy,
    description="domains spread over ranks, with private encoders and a shared one",
)
