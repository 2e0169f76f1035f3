"""Reduces a module to the layers of one rank.

Placeholders without parameters replace other ranks' layers, so that the names of parameters stay.
The memory of these layers is freed until the layers are put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.batch_norm import norms_of
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.pipeline.stage_plan import StagePlacement
from sparsepipe.strategies.sharding import ModulePart

_ZEROING = "on_validation_model_zero_grad"


class RemoteTensor(Tensor):
    """A parameter or buffer while only another rank has its values.

    The object itself becomes an instance, whatever list, closure or attribute holds it. Shape,
    dtype, device and the like may be read; other uses raise a :class:`ConfigError`.
    """

    _name: str
    _part: StageModule
    _whole: Tensor
    _kind: type[Tensor]

    @classmethod
    def hide(cls, tensor: Tensor, *, name: str, part: StageModule) -> None:
        """Frees the values of ``tensor``, which becomes an instance."""
        vars(tensor).update(
            _whole=torch.empty_like(tensor, device="meta"),
            _name=name,
            _part=part,
            _kind=type(tensor),
            _is_param=isinstance(tensor, nn.Parameter),
        )
        tensor.data = tensor.data.new_empty(0)
        tensor.__class__ = cls

    def show(self) -> None:
        """Makes this a tensor of its former class and shape again, whose values are NaN."""
        whole = self._whole
        self.__class__ = self._kind  # type: ignore[assignment]
        for name in ("_whole", "_name", "_part", "_kind", "_is_param"):
            vars(self).pop(name)
        none = float("nan") if self.is_floating_point() else 0
        self.data = torch.full_like(whole, none, device=self.device)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _OF_SHAPE:
            return func(args[0]._whole, *args[1:], **(kwargs or {}))
        if func in _READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs or {}))
        first = next(leaf for leaf in leaves if isinstance(leaf, cls))
        code = "a step" if first._part.in_step else "a hook"
        raise ConfigError(
            f"{code} uses {first._name}, which is on another rank: before its call of the layers, "
            "a step of a pipeline has only tensors of the first stage, from that call on only "
            "those of the last, and a hook only those of its rank's stage",
            remedy="leave a penalty on weights to the optimizer (weight_decay), add its gradient "
            "in on_before_optimizer_step to each of self.parameters(), which are there those of "
            "the rank, or train with parallel=dp",
        )


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_OF_SHAPE = {
    *(Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.size, Tensor.__len__, Tensor.__repr__),
    *_getters("shape", "ndim", "nbytes"),
}
_READABLE = {
    *(Tensor.requires_grad_, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor),
    *_getters("dtype", "requires_grad", "layout", "is_cuda", "device", "is_leaf", "grad"),
}


class _RemoteTensors(dict[str, Any]):
    """Parameters or buffers of a placeholder by name, which are hidden except within a step."""

    def __init__(self, tensors: Mapping[str, Tensor], part: StageModule) -> None:
        super().__init__()
        self._tensors = tensors
        self._part = part

    def items(self) -> Any:
        if self._part.in_step:
            return self._tensors.items()
        if any(isinstance(each, nn.Parameter) for each in self._tensors.values()):
            self._part.notice()
        return super().items()

    def __contains__(self, name: object) -> bool:
        return self._part.in_step and name in self._tensors

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __deepcopy__(self, memo: Any) -> _RemoteTensors:
        self._part.notice()
        return self


class _RemoteAttributeError(ConfigError, AttributeError):
    """A ConfigError that is also an AttributeError, so that ``hasattr`` returns False."""


class PlaceholderLayer(nn.Module):
    """Stands in for a layer that another rank runs; it has no parameters."""

    def __init__(self, name: str, layer: nn.Module, part: StageModule) -> None:
        super().__init__()
        self.name = name
        self._parameters = _RemoteTensors(dict(layer.named_parameters()), part)
        self._buffers = _RemoteTensors(dict(layer.named_buffers()), part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"layer {self.name} was called by itself, but it is on another rank",
            remedy=f"call the whole Sequential ({self.name.rpartition('.')[0]}) once per step",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = vars(self).get("name")
            raise _RemoteAttributeError(
                f"{layer}.{name} is not available: layer {layer} is on another rank",
                remedy="leave the layers' parameters and buffers to the stage that has them: use "
                "the optimizer's weight_decay for penalties, and hooks such as "
                "on_before_optimizer_step, which run on every rank, for the rest",
            ) from None


class StageModule(ModulePart):
    """A module reduced to the layers of one stage, until the other layers are put back.

    It tracks when users' code may meet placeholders. In a step, a penalty over all parameters would
    count those of one stage only: there, stand-ins for the parameters of other ranks raise an error
    when they are used. A hook may well go through the parameters of its own stage; rank 0 warns
    once that these are not all.

    Attributes:
        is_last: whether this is the last stage, which owns everything outside of the layers.
        in_step: whether a step of the user's module is running.
    """

    def __init__(self, placement: StagePlacement, *, stage: int) -> None:
        self._placement, self._stage = placement, stage
        self.is_last = stage == placement.plan.num_stages - 1
        self._removed: dict[int, nn.Module] = {}
        self._emptied: list[Tensor] = []
        self._silent_in: str | None = None
        self._warned = self.in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context in which the module's step runs, and other ranks' parameters are stand-ins."""
        before, self.in_step = self.in_step, True
        try:
            yield
        finally:
            self.in_step = before

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Context in which SparsePipe reads parameters without a warning; hooks still cause one."""
        before, self._silent_in = self._silent_in, self._hook()
        try:
            yield
        finally:
            self._silent_in = before

    def notice(self) -> None:
        """Warns, at most once, if a user's hook is going through a placeholder's parameters."""
        hook = self._hook()
        if self._warned or hook in (None, self._silent_in):
            return
        self._warned = True
        rank_zero_warn(
            f"{hook} goes through the parameters of a module, but each rank of a pipeline has only "
            "its own stage: a norm, a sum or an average over them is not that of the whole "
            "network, and parameters of a copy, such as a momentum teacher, are paired with wrong "
            "ones. Code that changes each parameter on its own works as intended. For anything "
            "else use a checkpoint, which holds the whole network."
        )

    def _hook(self) -> str | None:
        """Returns the running hook's name, if any, except Lightning's own that zeroes gradients."""
        module = self._placement.module
        hook = internals.current_hook(module) if isinstance(module, pl.LightningModule) else None
        return None if hook == _ZEROING and not is_overridden(_ZEROING, module) else hook

    def holds(self, name: str) -> bool:
        """Returns whether this rank's stage owns the parameter or buffer called ``name``."""
        return self._placement.stage_of(name) == self._stage

    def layer_of(self, name: str) -> str:
        """Returns the key of the layer with the parameter ``name``; empty if it is in none."""
        inside = name.removeprefix(f"{self._placement.name}.")
        return inside.partition(".")[0] if inside != name else ""

    def source(self, name: str) -> int:
        """Returns the first rank of the stage that owns the parameter or buffer ``name``."""
        return self._placement.plan.rank_of(self._placement.stage_of(name), 0)

    def prune(self) -> None:
        """Replaces the layers of other stages with placeholders, and frees their memory."""
        placement = self._placement
        layers = placement.layers
        first, last = placement.plan.stages[self._stage].layers
        for position, (key, layer) in enumerate(list(layers._modules.items())):
            assert layer is not None
            if not first <= position <= last:
                self._removed[position] = layer
                layers[position] = PlaceholderLayer(f"{placement.name}.{key}", layer, self)
        module = placement.module
        kept = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        with torch.no_grad():
            for position, layer in self._removed.items():
                for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                    if id(tensor) not in kept:
                        kept.add(id(tensor))
                        self._emptied.append(tensor)
                        key = list(layers._modules)[position]
                        RemoteTensor.hide(tensor, name=f"{placement.name}.{key}.{name}", part=self)

    def unprune(self) -> None:
        """Puts the layers back; their parameters are NaN until :meth:`ShardedModule.fill`."""
        with torch.no_grad():
            for tensor in self._emptied:
                assert isinstance(tensor, RemoteTensor)
                tensor.show()
        for position, layer in self._removed.items():
            self._placement.layers[position] = layer
        self._emptied.clear()
        self._removed.clear()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the trainable parameters that this rank's stage owns, with their names."""
        for name, parameter in self._placement.module.named_parameters():
            if parameter.requires_grad and self.holds(name):
                yield name, parameter

    def norms(self) -> tuple[dict[str, _BatchNorm], dict[str, _BatchNorm]]:
        """Returns, by name, the batch norms that this stage owns, and those outside of the layers;
        in the last stage, which owns these, the second mapping is empty.
        """
        inside, norms = f"{self._placement.name}.", norms_of(self._placement.module).items()
        outside = {name: each for name, each in norms if not name.startswith(inside)}
        own = {name: each for name, each in norms if self.holds(name)}
        return own, {} if self.is_last else outside


def check_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises a ConfigError if a parameter has a hook for its gradient."""
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{name} has a hook for its gradient, but no backward pass of a pipeline computes "
                "the whole gradient of an update",
                remedy="change gradients in on_before_optimizer_step, where each rank has those of "
                "its own stage",
            )
