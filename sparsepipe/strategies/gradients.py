"""Gives hooks and ``torch.autograd.grad`` the gradients of whole samples while ranks have parts.

In a backward pass of ranks that share samples or domains, each rank has a part of every parameter's
gradient. Hooks of parameters are called when the ranks' parts have been added up; what else would
see a part is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives.halo import add_up, added_up
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.normalization import recomputing
from sparsepipe.spatial.shard import Shard, alike, local_of, shard_of

_IN_PARTS = (
    *("sparsepipe.spatial.", "sparsepipe.domains.", "sparsepipe.runtime.collectives."),
    "torch.utils.checkpoint",
)
"""Modules with autograd functions that exchange parts, or hide such functions."""


def _refused(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{what} would see this rank's part of gradients, not the gradients of whole samples",
        remedy=remedy,
    )


def check_module_hooks(module: nn.Module) -> None:
    """Raises a ConfigError if ``module``, or a module in it, has a backward hook."""
    of_all = (
        nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks
    )
    for name, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks or of_all:
            raise _refused(
                f"the backward hook of {name or 'the module'}",
                "change gradients of parameters, in Tensor.register_hook",
            )


@dataclass(eq=False, slots=True)
class PartGradients:
    """Watches the backward passes of a Trainer on ranks that have parts of gradients.

    Args:
        module: the module that is trained.
        parameters: returns the parameters that are trained, inside and outside of the module.
        grid: grid whose ranks all compute the same losses, so that a gradient is the mean of the
            ranks' gradients; None: all that has parts is refused.
        within: returns whether users' code is running, outside of which nothing is watched.
    """

    module: pl.LightningModule
    parameters: Callable[[], Iterable[Tensor]]
    grid: Grid | None
    within: Callable[[], bool] = lambda: True
    _finish: Callable[[], None] | None = None

    def seen(self) -> bool:
        """Returns whether users' code looks at gradients after each backward pass."""
        callbacks = self.module.trainer.callbacks  # type: ignore[attr-defined]
        name = "on_after_backward"
        return (
            any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters())
            or is_overridden(name, self.module)
            or any(is_overridden(name, each, pl.Callback) for each in callbacks)
        )

    @contextmanager
    def finished_by(self, finish: Callable[[], None]) -> Iterator[None]:
        """Context for one backward pass into parameters, after which ``finish`` adds up parts."""
        self._finish = finish
        try:
            yield
        finally:
            self._finish = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which all functions of ``torch.autograd`` are watched, on this process."""
        run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        register, settable = Tensor.register_hook, cast(Any, Tensor.requires_grad)
        require = partial(self._require, register)
        rules: dict[Any, Any] = {Tensor.requires_grad_: require, settable.__set__: require}
        rules[Tensor.retain_grad] = _refuse
        former = {each: Shard.rules[each] for each in rules}

        def watching(outputs: Any, *args: Any, accumulate_grad: bool, **more: Any) -> Any:
            inner = recomputing() or not self.within()  # such as a checkpoint's
            if inner or torch._C._are_functorch_transforms_active():  # which refuse shards
                return run(outputs, *args, accumulate_grad=accumulate_grad, **more)
            if not accumulate_grad:
                return self._gradients(run, outputs, *args)
            finish, self._finish = self._finish, None
            if finish is None and self._has_parts(outputs):
                raise _refused(
                    "backward(), called by hand,",
                    "call self.manual_backward(loss), once for each loss",
                )
            if finish is None:
                return run(outputs, *args, accumulate_grad=True, **more)
            check_module_hooks(self.module)
            with _hooks_later(self.parameters()):
                run(outputs, *args, accumulate_grad=True, **more)
                finish()
            return None

        torch.autograd._engine_run_backward = watching  # type: ignore[attr-defined, assignment]
        Tensor.register_hook = lambda value, hook: self._register(register, value, hook)  # type: ignore[method-assign]
        Shard.rules.update(rules)
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
            Tensor.register_hook = register  # type: ignore[method-assign]
            Shard.rules.update(former)

    def _gradients(self, run: Any, outputs: Sequence[Any], seeds: Any, *args: Any) -> Any:
        """Returns what ``torch.autograd.grad`` does, for whole samples.

        All ranks backpropagate from each plain output, but from their own part of each shard.
        """
        inputs: Sequence[Any] = args[2]
        grid, has_parts = self.grid, self._has_parts(outputs, inputs)
        own = {id(each) for each in self.parameters()}
        unclear = any(
            not isinstance(each, Tensor) or (id(each) in own and bool(each._backward_hooks))
            for each in inputs
        )
        if has_parts and (grid is None or unclear):
            what = "torch.autograd.grad" + " of a parameter with a hook" * unclear
            raise _refused(what, "use gradients in on_before_optimizer_step instead")
        if grid is None or not has_parts:
            return run(outputs, seeds, *args, accumulate_grad=False)
        pairs = zip(outputs, seeds, strict=True)
        seeds = tuple(local_of(s) * grid.size if isinstance(o, Shard) else s for o, s in pairs)
        found = run(outputs, seeds, *args, accumulate_grad=False)
        return tuple(map(self._whole, found, inputs))

    def _whole(self, gradient: Tensor | None, value: Tensor) -> Tensor | None:
        """Returns a whole's gradient, given this rank's gradient of ``value``."""
        assert self.grid is not None
        if gradient is None or not isinstance(value, Shard):
            return None if gradient is None else self._mean(gradient)
        return alike(gradient if _counts_once(value) else gradient / self.grid.size, value)

    def _mean(self, gradient: Tensor) -> Tensor:
        assert self.grid is not None
        total = added_up if torch.is_grad_enabled() and gradient.requires_grad else add_up
        return total(gradient, self.grid.group, what="gradients") / self.grid.size

    def _has_parts(self, outputs: Sequence[Any], inputs: Sequence[Any] | None = None) -> bool:
        """Returns whether a backward pass would give ranks parts of gradients.

        It goes from ``outputs`` to ``inputs``, or to all leaves.
        """
        pending: list[Any] = [getattr(each, "grad_fn", None) for each in outputs]
        before: dict[Any, list[Any]] = {each: [] for each in pending if each is not None}
        while pending:
            if (node := pending.pop()) is not None:
                following = [each for each, _ in node.next_functions if each is not None]
                pending += [each for each in following if each not in before]
                for each in following:
                    before.setdefault(each, []).append(node)
        variables = {node: id(getattr(node, "variable", outputs)) for node in before}
        leaves = {number for number in variables.values() if number != id(outputs)}
        ids = leaves if inputs is None else {id(each) for each in inputs}
        own = {id(each) for each in self.parameters()} if self.grid is None else set()
        if ids & leaves & own or any(isinstance(each, Shard) for each in outputs):
            return True
        ends = {getattr(each, "grad_fn", None) for each in inputs or ()}
        pending = [node for node, number in variables.items() if number in ids or node in ends]
        known = set(pending)
        while pending:
            for node in before[pending.pop()]:
                made_by = getattr(type(node), "_forward_cls", type(None)).__module__
                if made_by.startswith(_IN_PARTS):
                    return True
                pending += [] if node in known else [node]
                known.add(node)
        return False

    def _register(self, register: Any, value: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Registers a hook, which gets the whole's gradient; that of a shard as a shard."""
        if self.grid is None and isinstance(value, Shard):
            return _refuse(register, value)
        if self.grid is None or any(value is each for each in self.parameters()):
            return register(value, hook)  # a parameter's is called after the backward pass
        if not isinstance(value, Shard):
            return register(value, lambda gradient: hook(self._mean(gradient)))
        # Not the shard itself, which would keep itself.
        like, times = (self.grid, value.dims, value.full), self.grid.size
        times = 1 if _counts_once(value) else times

        def of_whole(gradient: Tensor) -> Tensor | None:
            found = hook(shard_of(gradient / times, *like))
            return None if found is None else local_of(found) * times

        with torch._C.DisableTorchFunctionSubclass():
            return register(value, of_whole)

    def _require(self, register: Any, function: Any, shard: Shard, *args: Any) -> Any:
        """Makes a shard need a gradient, or not; a hook divides it by the number of ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            found, grid = function(shard, *args), self.grid
            needs = shard.requires_grad and shard.is_leaf and not recomputing()
            if grid is not None and needs and not _counts_once(shard):
                register(shard, lambda gradient: gradient / grid.size)
                vars(shard)["counts_once"] = True
        return found


def _counts_once(shard: Shard) -> bool:
    """Returns whether a hook divides a shard's gradient, which all ranks' losses contribute to."""
    return "counts_once" in vars(shard)


def _refuse(function: Any, *_: Any) -> Any:
    raise _refused(f"{function.__name__} of a shard", "use torch.autograd.grad")


@contextmanager
def _hooks_later(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context without hooks of parameters, which are called at its end."""
    inverse = reversed(list(parameters))  # about as a backward pass gets to them
    seen = [p for p in inverse if p._backward_hooks or p._post_accumulate_grad_hooks]
    # Copies, since a gradient may be DDP's buffer, in which the next one will be.
    before = [None if p.grad is None else p.grad.clone() for p in seen]
    hooks = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in seen]
    for p in seen:  # torch would not forget the latter at None
        p._backward_hooks, p._post_accumulate_grad_hooks, p.grad = None, OrderedDict(), None
    try:
        yield
    finally:
        for p, (first, last) in zip(seen, hooks, strict=True):
            p._backward_hooks, p._post_accumulate_grad_hooks = first, last
    with torch.no_grad():
        for p, old, (first, last) in zip(seen, before, hooks, strict=True):
            if (new := p.grad) is None:
                p.grad = old
                continue
            for hook in (first or {}).values():
                changed = hook(new)
                new = new if changed is None else changed
            p.grad = new if old is None else old + new
            for hook in (last or {}).values():
                hook(p)
