"""What stands on a rank where layers of other ranks were, and what it does when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import trainer_internals as internals

_ZEROING = "on_validation_model_zero_grad"


class Absence:
    """Knows when code of the user's may meet stand-ins; all those of a module share one.

    In a step a penalty over all parameters would count for those of one stage only: there the
    parameters of other ranks are in their places, and raise when they are used. A hook may well go
    through the parameters of its own stage; rank 0 warns once that these are not all.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._silent_in: str | None = None
        self._warned = False
        self.in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the user's."""
        before, self.in_step = self.in_step, True
        try:
            yield
        finally:
            self.in_step = before

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Around what the strategy does itself in a hook, but for hooks that it calls there."""
        before, self._silent_in = self._silent_in, self._hook()
        try:
            yield
        finally:
            self._silent_in = before

    def notice(self) -> None:
        """Somebody goes through the parameters of a layer that is not here."""
        hook = self._hook()
        if self._warned or hook in (None, self._silent_in):
            return
        self._warned = True
        rank_zero_warn(
            f"{hook} goes through the parameters of {type(self._module).__name__}, and in a "
            "pipeline each rank has those of its own stage only: a norm, a sum or an average over "
            "them is not that of the whole network, and a loop over them and over those of a whole "
            "copy, such as a momentum teacher, pairs the wrong ones. What changes each parameter "
            "by itself is right, as every rank does so to its own. For the rest, use a checkpoint: "
            "it holds the whole network."
        )

    def _hook(self) -> str | None:
        """The user's hook that is running; Lightning's own zeroes each parameter by itself."""
        module = self._module
        if not isinstance(module, pl.LightningModule):
            return None
        hook = internals.current_hook(module)
        is_lightnings = hook == _ZEROING and not is_overridden(_ZEROING, module)
        return None if is_lightnings else hook


class RemoteParameter(Tensor):
    """Has the shape of a parameter that is on another rank, and no values.

    Its shape, dtype and device may be read; anything else raises :class:`ConfigError`.
    """

    _is_param = True  # which is what isinstance(..., nn.Parameter) looks at
    _name: str
    _place: torch.device

    @staticmethod
    def of(parameter: Tensor, name: str) -> RemoteParameter:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        made = empty.as_subclass(RemoteParameter)
        made._name, made._place = name, parameter.device
        if parameter.requires_grad:
            made.requires_grad_()
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == Tensor.device.__get__:
            return args[0]._place
        if func in _READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs or {}))
        name = next(leaf._name for leaf in leaves if isinstance(leaf, cls))
        raise ConfigError(
            f"a step uses {name}, which is on another rank: a step of a pipeline has the "
            "parameters of its own stage only, in its first half those of the first stage, from "
            "its call of the layers on those of the last",
            remedy="leave a penalty on weights to the optimizer (weight_decay), add its gradient "
            "to theirs in on_before_optimizer_step, where each rank has its own, or train with "
            "parallel=dp",
        )


_READABLE = {
    Tensor.requires_grad_,
    Tensor.numel,
    Tensor.nelement,
    Tensor.dim,
    Tensor.size,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "ndim", "requires_grad", "layout", "is_cuda", "nbytes")
    ),
}


class _RemoteParameters(dict[str, Any]):
    """Parameters of a stand-in: none, but within a step."""

    def __init__(self, parameters: Mapping[str, RemoteParameter], absence: Absence) -> None:
        super().__init__()
        self._parameters = parameters
        self._absence = absence

    def items(self) -> Any:
        if self._absence.in_step:
            return self._parameters.items()
        self._absence.notice()
        return super().items()

    def __contains__(self, name: object) -> bool:
        return self._absence.in_step and name in self._parameters

    def __getitem__(self, name: str) -> Any:
        return self._parameters[name]

    def __deepcopy__(self, memo: Any) -> _RemoteParameters:
        self._absence.notice()
        return self


class _RemoteAttributeError(ConfigError, AttributeError):
    """So that ``hasattr`` still answers."""


class Remote(nn.Module):
    """Stands where a layer is that another rank runs; it has no parameters."""

    def __init__(self, name: str, layer: nn.Module, absence: Absence) -> None:
        super().__init__()
        self.name = name
        parameters = {
            inner: RemoteParameter.of(parameter, f"{name}.{inner}")
            for inner, parameter in layer.named_parameters()
        }
        self._parameters = _RemoteParameters(parameters, absence)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: layers are called all at once."""
        raise ConfigError(
            f"layer {self.name} was called by itself, and it is on another rank",
            remedy=f"call the whole Sequential ({self.name.rpartition('.')[0]}) once a step",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = vars(self).get("name")
            raise _RemoteAttributeError(
                f"{layer}.{name} was looked for, and layer {layer} is on another rank",
                remedy="leave the layers' parameters and buffers to the stage that has them: use "
                "the optimizer's weight_decay for penalties, and hooks such as "
                "on_before_optimizer_step, which run on every rank, for the rest",
            ) from None

    def extra_repr(self) -> str:
        return f"{self.name} is on another rank"
