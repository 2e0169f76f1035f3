"""The layers of a module: which rank holds which, and a module reduced to those of one rank.

A rank keeps the layers of its stage. The others give way to stand-ins without parameters,
so that names stay, and give their memory back until the module is made whole again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.batch_norm import norms_of
from sparsepipe.schedule import Plan
from sparsepipe.strategies.pipeline.stand_ins import Absence, Remote


def find_layers(module: nn.Module, name: str | None) -> str:
    """Name of the ``nn.Sequential`` that a plan cuts.

    Args:
        module: the LightningModule.
        name: dotted name given by the user; None: ``layers``, else the one Sequential that is
            a child of the module, else the one that is a child of its children.

    Raises:
        ConfigError: there is none, or more than one, or its layers do not run one by one.
    """
    if name is not None:
        found = dict(module.named_modules()).get(name)
        if not isinstance(found, nn.Sequential):
            raise ConfigError(
                f"layers={name!r} names no nn.Sequential of {type(module).__name__}",
                remedy=f"name one of {_sequentials(module) or 'its own: it has none'}",
            )
        return _plain(module, name)
    for depth in (1, 2):
        candidates = [found for found in _sequentials(module) if found.count(".") == depth - 1]
        named = [found for found in candidates if found.rpartition(".")[2] == "layers"]
        if len(named) == 1 or len(candidates) == 1:
            return _plain(module, (named if len(named) == 1 else candidates)[0])
        if candidates:
            raise ConfigError(
                f"{type(module).__name__} has several nn.Sequential: {', '.join(candidates)}",
                remedy=f"name the one to split, such as layers={candidates[0]!r}",
            )
    raise ConfigError(
        f"{type(module).__name__} has no nn.Sequential to cut into stages",
        remedy="put the network into one nn.Sequential and call it once in each step",
    )


def _plain(module: nn.Module, name: str) -> str:
    """The name of a Sequential that does nothing but run its layers in turn."""
    found = module.get_submodule(name)
    if getattr(found.forward, "__func__", None) is not nn.Sequential.forward:
        raise ConfigError(
            f"{name} is a {type(found).__name__} with a forward of its own, and stages run its "
            "layers one by one",
            remedy="move that code into an entry of the Sequential, or into the steps",
        )
    if found._backward_hooks or found._backward_pre_hooks:
        raise ConfigError(
            f"{name} has a backward hook, and no rank runs the backward of all its layers",
            remedy="register it on an entry of the Sequential",
        )
    return name


def _sequentials(module: nn.Module) -> list[str]:
    """Names of the Sequentials that are children, or children of children."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.Sequential) and 0 < len(name.split(".")) <= 2 and name
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The stages that own the parameters and buffers of a module."""

    module: nn.Module
    name: str
    plan: Plan

    @property
    def layers(self) -> nn.Sequential:
        found = self.module.get_submodule(self.name)
        assert isinstance(found, nn.Sequential)
        return found

    def keys_of(self, stage: int) -> list[str]:
        """Names within the Sequential of the layers of a stage."""
        first, last = self.plan.stages[stage].layers
        return list(self.layers._modules)[first : last + 1]

    def stage_of(self, name: str) -> int:
        """The stage that owns a parameter or buffer; what is in no layer is the last one's."""
        prefix = f"{self.name}."
        if name.startswith(prefix):
            key = name.removeprefix(prefix).partition(".")[0]
            layer = list(self.layers._modules).index(key)
            for stage, entry in enumerate(self.plan.stages):
                if entry.layers[0] <= layer <= entry.layers[1]:
                    return stage
        return self.plan.num_stages - 1

    def check_ties(self) -> None:
        """Refuse parameters and buffers that belong to two stages."""
        owner: dict[int, tuple[int, str]] = {}
        named = (
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            stage = self.stage_of(name)
            first, other = owner.setdefault(id(tensor), (stage, name))
            if first != stage:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise ConfigError(
                    f"{other} (stage {first}) and {name} (stage {stage}) are one {kind}",
                    remedy="move the cut so that both are in one stage, or untie them",
                )


class Shard:
    """A module reduced to the layers of one rank, until they are put back."""

    def __init__(self, placement: Placement, *, stage: int) -> None:
        self._placement = placement
        self._stage = stage
        self.absence = Absence(placement.module)
        self._removed: dict[int, nn.Module] = {}
        self._emptied: list[tuple[Tensor, torch.Size]] = []

    def holds(self, name: str) -> bool:
        """Whether this rank's stage owns a parameter or buffer."""
        return self._placement.stage_of(name) == self._stage

    def source(self, name: str) -> int:
        """The first replica of the stage that owns a parameter or buffer."""
        return self._placement.plan.rank_of(self._placement.stage_of(name), 0)

    def silent(self) -> AbstractContextManager[None]:
        """Around looks at the parameters that are no user's."""
        return self.absence.silent()

    @property
    def is_last(self) -> bool:
        """Whether this rank owns what is in no layer."""
        return self._stage == self._placement.plan.num_stages - 1

    @property
    def runs_foreign_code(self) -> bool:
        """Whether code that is neither ours nor Lightning's runs between two steps."""
        module = self._placement.module
        trainer = module.trainer if isinstance(module, pl.LightningModule) else None
        callbacks = trainer.callbacks if trainer is not None else []  # type: ignore[attr-defined]
        ours = (type(each).__module__.partition(".")[0] for each in (module, *callbacks))
        lambdas = any(isinstance(each, LambdaCallback) for each in callbacks)
        return lambdas or not {*ours} <= {"sparsepipe", "pytorch_lightning"}

    def prune(self) -> None:
        """Puts stand-ins in place of the layers of other stages, and frees these."""
        placement = self._placement
        layers = placement.layers
        mine = set(placement.keys_of(self._stage))
        for position, (key, layer) in enumerate(list(layers._modules.items())):
            assert layer is not None
            if key not in mine:
                self._removed[position] = layer
                layers[position] = Remote(f"{placement.name}.{key}", layer, self.absence)
        kept = {id(tensor) for tensor in tensors_of(placement.module)}
        with torch.no_grad():
            for layer in self._removed.values():
                for tensor in tensors_of(layer):
                    if id(tensor) not in kept and tensor.numel():
                        kept.add(id(tensor))
                        self._emptied.append((tensor, tensor.shape))
                        tensor.data = tensor.data.new_empty(0)

    def unprune(self) -> None:
        """Puts the layers back; their values are NaN until :meth:`ShardedModule.fill`."""
        with torch.no_grad():
            for tensor, shape in self._emptied:
                none = float("nan") if tensor.is_floating_point() else 0
                tensor.data = tensor.data.new_full(shape, none)
        for position, layer in self._removed.items():
            self._placement.layers[position] = layer
        self._emptied.clear()
        self._removed.clear()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and trainable parameters that this rank's stage owns."""
        for name, parameter in self._placement.module.named_parameters():
            if parameter.requires_grad and self.holds(name):
                yield name, parameter

    def check_trained(self, names: Collection[str]) -> None:
        """Refuse to train what did not learn when the run began: no rank would update it.

        Raises:
            ConfigError: such a parameter now requires a gradient.
        """
        with self.absence.silent():
            late = [name for name, _ in self.parameters() if name not in names]
        if late:
            raise ConfigError(
                f"{late[0]} was frozen when the run began, and is to learn now",
                remedy="let it require a gradient from the beginning, with lr=0 in a group of the "
                "optimizer until it is to learn; or train in two runs",
            )

    def norms(self) -> dict[str, _BatchNorm]:
        """Batch norms that this rank's stage owns, by name."""
        return {
            name: norm
            for name, norm in norms_of(self._placement.module).items()
            if self.holds(name)
        }

    def norms_of_others(self) -> dict[str, _BatchNorm]:
        """Batch norms outside of the layers, by name, where they are not this rank's stage's."""
        inside = f"{self._placement.name}."
        norms = norms_of(self._placement.module).items()
        return {name: n for name, n in norms if not self.is_last and not name.startswith(inside)}

    def statistics(self) -> list[Tensor]:
        """Buffers that this rank's stage owns, such as running statistics."""
        return [
            buffer for name, buffer in self._placement.module.named_buffers() if self.holds(name)
        ]


def tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """Parameters and buffers of a module, each once."""
    yield from module.parameters()
    yield from module.buffers()


def check_initialised(module: pl.LightningModule) -> None:
    """Refuse lazy layers, whose shapes are not known yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"{name} has no shape yet: its layer is lazy",
                remedy="run the network once on a batch before it is given to the Trainer",
            )
