"""Sees from what users' code computes updates and losses."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.transport.serialization import differentiable
from sparsepipe.strategies import trainer_internals as internals

Sources = frozenset[str]
"""Keys of the layers, or of the only layer's parameters, from which a value was computed."""

_READING = ("item", "__bool__", "__float__", "__int__", "tolist", "numpy", "__array__")
_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_IN_PLACE = re.compile(r"(?!__)\w*_|__i(?!nvert__|nt__)\w*|__setitem__")
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow")


class UpdateWatch(TorchFunctionMode):
    """Refuses, within its context, an update by values of several layers, such as their norm.

    A rank has only the layers of its stage, so that each would update by a norm of its own. Results
    of an operation have all sources of its arguments; those of operations on lists of tensors have
    them position by position. A hook that reads a bool, and then changes anything other than what
    that was computed from, is taken to decide by it, and so is code that has read numbers of
    several layers.

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
        one = len(set(map(layer_of, parameters))) == 1
        self._parameters: dict[str, list[Tensor]] = {}
        self._found = WeakTensorKeyDictionary()
        for name, parameter in parameters.items():
            key = name if one else layer_of(name)
            self._parameters.setdefault(key, []).append(parameter)
            self._found[parameter] = frozenset([key])
        self._hook: str | None = None
        self._told: Sources = (
            frozenset()
        )  # of all numbers that the hook, or the optimizer, has read
        self._last: Sources = frozenset()  # of the last value by which it may decide

    def sources(self, value: Any) -> Sources:
        """Returns the sources of all tensors and numbers in a value."""
        if isinstance(value, Tensor):
            found: Sources = self._found.get(value, frozenset())  # type: ignore[no-untyped-call]
            return found
        if isinstance(value, Number):
            return value.sources
        inside = value.values() if isinstance(value, dict) else value
        known = isinstance(value, list | tuple | dict)
        return frozenset().union(*map(self.sources, inside if known else ()))

    def read(self, value: Any, sources: Sources, *, kept: bool = False) -> Any:
        """Returns what users' code gets for a value read from tensors; if ``kept``, a Number."""
        kept, decides = kept and type(value) is float, type(value) is bool
        if not kept:
            self._check(sources)
        if not (decides or (kept and len(sources) < 2)):
            self._told |= sources
        if sources and ((decides and self._hook in _HOOKS) or len(self._told) > 1):
            self._last = sources
        if kept and sources:
            value = Number(value)
            value.sources, value.watch = sources, self
        return value

    def _mark(self, value: Any, sources: Sources) -> None:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor) and sources:
                self._found[each] = found = self.sources(each) | sources
                if len(found) > 1:
                    self._notice()
            elif isinstance(each, list | tuple):
                self._mark(each, sources)

    def _write(self, target: Any, sources: Sources, *, drops: bool) -> None:
        """Checks by what a tensor is about to be changed, if it is a parameter or a gradient;
        ``drops``: whether it becomes zero or None, as all do where an update is skipped.
        """
        places, own_sources = set(), self.sources(target)
        for key in own_sources:
            for parameter in self._parameters[key]:
                own = [parameter] if parameter.grad is None else [parameter, parameter.grad]
                places |= {each.untyped_storage().data_ptr() for each in own}
        if target.untyped_storage().data_ptr() in places:
            self._check(sources | own_sources | self._last)
            if not drops:
                self._told, self._last = self._told - own_sources, self._last - own_sources

    def _check(self, sources: Sources) -> None:
        if len(sources) > 1:
            raise ConfigError(
                "a hook or the optimizer computes an update from the gradients or weights of "
                "several layers, such as their norm, but a rank of a pipeline has only those of "
                "its stage",
                remedy="clip by norm with gradient_clip_val of the Trainer, change each parameter "
                "by its own values, or train with parallel=dp",
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (hook := internals.current_hook(self._module)) != self._hook:
            self._hook, self._told, self._last = hook, frozenset(), frozenset()
        if name in ("__set__", "__delete__"):
            if getattr(func.__self__, "__name__", "") in ("grad", "data"):
                drops = name == "__delete__" or args[1] is None
                self._write(args[0], self.sources(args[1:]), drops=drops)
            return func(*args, **kwargs)
        rows = [(*args, *kwargs.values())]
        by_place = name.startswith(("_foreach", "_fused"))
        if by_place:
            lists = [each for each in rows[0] if isinstance(each, list | tuple) and each]
            rest = [each for each in rows[0] if not isinstance(each, list | tuple)]
            rows = [(*each, *rest) for each in zip(*lists, strict=True)]
        found = list(map(self.sources, rows))
        in_place = _IN_PLACE.fullmatch(name) is not None
        for row, sources in zip(rows, found, strict=True):
            for changed in [*row[:in_place], kwargs.get("out")]:
                if isinstance(changed, Tensor):
                    self._write(changed, sources, drops=name.endswith("zero_"))
                    self._mark(changed, sources)
        result = func(*args, **kwargs)
        if name in _READING:
            return self.read(result, found[0], kept=name == "item")
        if not by_place:
            self._mark(result, found[0])
        elif isinstance(result, list | tuple):
            for each, sources in zip(result, found, strict=True):
                self._mark(each, sources)
        return result


class Number(float):
    """A number that was read from tensors, and passes their sources on."""

    sources: Sources
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


class LossWatch:
    """Finds what weight the loss of a microbatch has in that of its minibatch.

    A mean over samples has their number. Torch's cross-entropy of weighted classes, ignored labels
    or single voxels is a mean over labels, whose sum of weights its node in the graph has. There is
    a warning if a sum in the loss is divided by something else, or by nothing.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._kind = type(module).__name__
        self._outputs: set[Node] = set()
        self._before: list[float] = []
        self._warned = False

    def follow(self, output: Any) -> None:
        """Notes the output of the layers, from which the loss is computed."""
        self._outputs = {get_gradient_edge(each).node for each in differentiable(output)}

    def weight(self, loss: Tensor, *, samples: int) -> float | None:
        """Returns the weight of the loss of a microbatch; None for the number of its samples."""
        weight: float | None = None
        divisors: list[float] = []
        for node, divided in [] if loss.grad_fn is None else self._sums(loss.grad_fn, samples):
            divisors += divided.flatten().tolist()
            found = float(divided) if divided.dim() == 0 else math.nan
            if weight is None and node.name().startswith("Nll") and math.isfinite(found):
                target = node._saved_target  # type: ignore[attr-defined]
                if len(target) != samples:  # single voxels, or selected samples
                    weight = found
                elif found != target.numel():
                    weight = found * samples / target.numel()
        self._outputs = set()
        if weight == 0:  # which changes nothing
            return weight
        before, self._before = self._before, [n / (weight or samples) for n in divisors]
        alike = all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(before, self._before, strict=False))
        if not self._warned and not (alike and all(map(math.isfinite, divisors))):
            self._warned = True
            warnings.warn(
                f"the loss of {self._kind}.training_step may not be a plain mean over samples, "
                "but that of a minibatch is the mean of its microbatches' by their numbers of "
                "samples. Return {'loss': loss, 'weight': weight}, where the weight is what the "
                "loss was divided by, such as the sum of a mask.",
                stacklevel=2,
            )
        return weight

    def _sums(self, root: Node, samples: int) -> Iterator[tuple[Node, Tensor]]:
        """Yields the nodes of a loss's graph that add up values of samples, and what these sums are
        divided by, which is NaN if that is unknown.
        """
        todo: list[tuple[Any, Any]] = [(root, None)]
        while todo:
            node, divisor = todo.pop()
            name = node.name()
            inside = [each for each in node.next_functions if each[0] is not None]
            shapes = [each._input_metadata[number].shape for each, number in inside]
            whole = [
                each
                for each, shape in zip(inside, shapes, strict=True)
                if len(shape) > 1 or (shape == [samples] and not each[0].name().startswith("Stack"))
            ]
            for each in [node] + [each for each, _ in whole] * name.startswith("Sum"):
                other = getattr(each, "_saved_other", None)
                if each.name().startswith(("Div", "Mul")) and other is not None:
                    by = torch.as_tensor(other).detach().double()
                    if by.dim() < 2 and by.shape != (samples,):
                        by = by if each.name().startswith("Div") else 1 / by
                        divisor = by if divisor is None else divisor * by
            todo += [(each, divisor) for each, _ in inside if (each, _) not in whole]
            if not self._reached(each for each, _ in whole):
                continue
            reduction = getattr(node, "_saved_reduction", 0)
            if name.startswith("Mean") or reduction == 1:
                first, number = whole[0]
                sizes = first._input_metadata[number].shape, node._input_metadata[0].shape
                divisor = torch.tensor(math.prod(sizes[0]) / math.prod(sizes[1]))
                divisor = getattr(node, "_saved_total_weight", divisor)
            elif name.startswith(("View", "Squeeze")):  # of a single value
                continue
            elif divisor is None or not (name.startswith("Sum") or reduction == 2):
                divisor = torch.tensor(math.nan)
            yield node, divisor

    def _reached(self, nodes: Iterable[Node]) -> bool:
        """Returns whether nodes are computed from the output of the layers."""
        todo, seen = list(nodes), set[Node]()
        while todo:
            if (node := todo.pop()) in self._outputs:
                return True
            seen.add(node)
            todo += [each for each, _ in node.next_functions if each and each not in seen]
        return False
