"""Follows values through tensor operations, to see what users' code computes from what."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import trainer_internals as internals

_READING = ("item", "__bool__", "__float__", "__int__", "tolist", "numpy", "__array__")
_DIVIDING = ("div", "divide", "true_divide", "__truediv__", "__itruediv__", "div_")
_SELECTING = ("masked_select", "nonzero", "topk", "kthvalue")
_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow")


class Provenance(TorchFunctionMode):
    """Notes, within its context, from which sources tensors were computed.

    A set of sources is an int with a bit for each. Results of an operation have all sources of its
    arguments; those of operations on lists of tensors have them position by position.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found = WeakTensorKeyDictionary()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context, within that of this object, of code that is not followed."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def mark(self, value: Any, sources: int) -> None:
        """Adds to the sources of all tensors in a value."""
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor) and sources:
                self._found[each] = self.sources(each) | sources
            elif isinstance(each, list | tuple):
                self.mark(each, sources)

    def sources(self, value: Any) -> int:
        """Returns the sources of all tensors and numbers in a value."""
        if isinstance(value, Tensor | Number):
            found = value.sources if isinstance(value, Number) else self._found.get(value, 0)  # type: ignore[no-untyped-call]
            return int(found)
        found = 0
        if isinstance(value, list | tuple | dict):
            for each in value.values() if isinstance(value, dict) else value:
                found |= self.sources(each)
        return found

    def read(self, value: Any, sources: int, *, kept: bool) -> Any:
        """Called with what is read from tensors: a number, say. Returns what users' code gets if
        ``kept``.
        """
        return value

    def written(self, target: Any, sources: int, *, drops: bool) -> None:
        """Called before a tensor is changed, or gets another gradient, with the new sources;
        ``drops``: whether it becomes zero or None.
        """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__delete__"):
            if getattr(func.__self__, "__name__", "") in ("grad", "data"):
                drops = name == "__delete__" or args[1] is None
                self.written(args[0], self.sources(args[1:]), drops=drops)
            return func(*args, **kwargs)
        rows = [(args, kwargs)]
        if name.startswith(("_foreach", "_fused")):
            given = (*args, *kwargs.values())
            lists = [each for each in given if isinstance(each, list | tuple)]
            rest = [each for each in given if not isinstance(each, list | tuple)]
            rows = [(each, rest) for each in zip(*lists, strict=True)]
        found = [self.sources(row) for row in rows]
        for (row, _), sources in zip(rows, found, strict=True):
            for changed in [*row[:1]] * _is_in_place(name) + [kwargs.get("out")]:
                if sources and changed is not None:
                    self.written(changed, sources, drops=name.endswith("zero_"))
                    self.mark(changed, sources)
        result = func(*args, **kwargs)
        if name in _READING:
            kept = name == "item"
            number = self.read(result, found[0], kept=kept)
            return number if kept else result
        if rows[0][0] is args:
            self.mark(result, found[0])
        elif isinstance(result, list | tuple):
            for each, sources in zip(result, found, strict=True):
                self.mark(each, sources)
        return result


def _is_in_place(name: str) -> bool:
    """Returns whether a function changes its first argument, as ``add_`` and ``__iadd__`` do."""
    if name.startswith("__"):
        return (name[2] == "i" and name not in ("__invert__", "__int__")) or name == "__setitem__"
    return name.endswith("_")


class Number(float):
    """A number that was read from tensors, and passes their sources on."""

    sources: int
    watch: UpdateWatch

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _passing_on(name: str) -> Callable[..., Any]:
    def apply(self: Number, *others: Any) -> Any:
        found = getattr(float, name)(self, *others)
        return self.watch.read(found, self.watch.sources((self, *others)), kept=True)

    return apply


torch.serialization.add_safe_globals([float])  # as which a Number in a checkpoint is read
for _name in (*_ARITHMETIC, "neg", "abs", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _passing_on(f"__{_name}__"))


class UpdateWatch(Provenance):
    """Refuses an update by values of several layers, such as their norm.

    A rank has only the layers of its stage, so that each would update by a norm of its own.

    Args:
        module: the module, whose hooks run.
        parameters: the stage's parameters, by name.
        layer_of: returns the layer of a parameter's name.
        notice: called when a tensor is computed from several layers, which may be only logged.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        parameters: Mapping[str, Tensor],
        *,
        layer_of: Callable[[str], str],
        notice: Callable[[], None],
    ) -> None:
        super().__init__()
        self._module, self._notice = module, notice
        self._parameters = list(parameters.values())
        self._layers = list(map(layer_of, parameters))
        self._hook: str | None = None
        self._told = 0  # sources of all numbers that the hook has read, but bools
        self._last = 0  # sources of the last one by which it may decide what to write
        for place, parameter in enumerate(self._parameters):
            self.mark(parameter, 1 << place)

    def _is_global(self, sources: int) -> bool:
        """Returns whether values come from several layers, or all parameters of the only one."""
        layers = {layer for place, layer in enumerate(self._layers) if sources >> place & 1}
        several = bool(sources & (sources - 1))
        return len(layers) > 1 or (several and sources == (1 << len(self._layers)) - 1)

    def mark(self, value: Any, sources: int) -> None:
        super().mark(value, sources)
        if self._is_global(sources):
            self._notice()

    def _in_hook(self) -> bool:
        """Returns whether a hook runs that has the gradients; forgets what others have read."""
        hook = internals.current_hook(self._module)
        if hook != self._hook:
            self._hook, self._last, self._told = hook, 0, 0
        return hook in _HOOKS

    def read(self, value: Any, sources: int, *, kept: bool) -> Any:
        self._check(sources)
        if kept and type(value) is float and sources:
            value = Number(value)
            value.sources, value.watch = sources, self
        elif self._in_hook():
            self._told |= 0 if type(value) is bool else sources
            if type(value) is bool or self._is_global(self._told):
                self._last = sources
        return value

    def written(self, target: Any, sources: int, *, drops: bool) -> None:
        known = self.sources(target)
        for place, parameter in enumerate(self._parameters):
            if known >> place & 1 and _shares(target, parameter):
                # A loop over parameters that decides about each has last read what it changes.
                self._check(sources | 1 << place | (self._last if self._in_hook() else 0))
                self._last &= -1 if drops else ~(1 << place)

    def _check(self, sources: int) -> None:
        if self._is_global(sources):
            raise ConfigError(
                "a hook or the optimizer computes an update from the gradients or weights of "
                "several layers, such as their norm, but a rank of a pipeline has only those of "
                "its stage",
                remedy="clip by norm with gradient_clip_val of the Trainer, change each parameter "
                "by its own values, or train with parallel=dp",
            )


def _shares(target: Tensor, parameter: Tensor) -> bool:
    """Returns whether a tensor has the memory of a parameter or of its gradient."""
    with torch._C.DisableTorchFunction():
        own = [each for each in (parameter, parameter.grad) if each is not None]
        places = [each.untyped_storage().data_ptr() for each in own]
        return target.untyped_storage().data_ptr() in places


class LossWatch(Provenance):
    """Finds what weight the loss of a microbatch has in that of its minibatch.

    A mean over samples has their number. Torch's cross-entropy of weighted classes, ignored labels
    or single voxels is a mean over labels, whose sum of weights is known. Of other losses that are
    divided by, or selected by, values of samples, there is a warning.
    """

    _DATA, _UNEVEN = 1, 2

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self._kind = type(module).__name__
        self._samples = 0
        self._weights = WeakTensorKeyDictionary()
        self._warned = False

    def begin(self, batch: Any, *, samples: int) -> None:
        """Begins the step of a microbatch."""
        self._samples = samples
        self.follow(batch)

    def follow(self, values: Any) -> None:
        """Notes that tensors have values of samples: the batch, and the output of the layers."""
        self.mark(pytree.tree_leaves(values), self._DATA)

    def weight(self, loss: Tensor) -> float | None:
        """Returns the weight of the step's loss; None for the number of its samples."""
        if loss in self._weights:
            return float(self._weights[loss])
        if self.sources(loss) & self._UNEVEN and not self._warned:
            self._warned = True
            warnings.warn(
                f"the loss of {self._kind}.training_step is not a plain mean over samples, but "
                "that of a minibatch is the mean of its microbatches' by their numbers of samples. "
                "Return {'loss': loss, 'weight': weight}, where the weight is what the loss was "
                "divided by, such as the sum of a mask.",
                stacklevel=2,
            )
        return None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func in (F.cross_entropy, F.nll_loss):
            given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            if (weight := self._of_labels(given)) is not None:
                self._weights[result] = weight
                self.mark(result, self._UNEVEN)
        elif any(self.sources(each) & self._DATA for each in self._counted(func, args)):
            self.mark(result, self._UNEVEN)
        return result

    def _of_labels(self, given: Mapping[str, Any]) -> float | None:
        """Returns the sum of the labels' weights, which torch divides by, as a number of samples;
        None if each sample has the same. ``given``: the arguments of a loss of labels.
        """
        target, weight = given["target"], given.get("weight")
        whole = given.get("reduction", "mean") == "mean" and target.dim()
        if not whole or target.is_floating_point():
            return None
        seen = target != given.get("ignore_index", -100)
        found = float(seen.sum() if weight is None else weight.double()[target[seen]].sum())
        if len(target) != self._samples:  # single voxels, or selected samples
            return found
        return None if found == target.numel() else found * self._samples / target.numel()

    def _counted(self, func: Any, args: tuple[Any, ...]) -> Iterable[Any]:
        """Yields what an operation divides by, unless it is for each sample, or selects by."""
        name = getattr(func, "__name__", "")
        if name in _SELECTING:
            yield args
        if name in _DIVIDING and isinstance(by := args[1], Tensor):
            yield by if by.dim() < 2 and by.shape[:1] != (self._samples,) else None
        if name == "__getitem__":
            for by in args[1] if isinstance(args[1], tuple) else args[1:]:
                if isinstance(by, Tensor) and by.dim():
                    yield by if by.dtype == torch.bool or len(by) != self._samples else None
