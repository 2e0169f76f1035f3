"""Forward and backward of one stage's layers on the weights of one minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.activation_checkpointing import RecomputedSpan
from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.transport.serialization import differentiable

Close = Callable[[Callable[[], Any]], tuple[Tensor, Any]]
"""The step of the last of several stages: calls its argument once for the output of the layers, and
returns the loss and a value that is passed on to the worker."""
Step = Callable[[Callable[[Any], Any]], tuple[Tensor, Any]]
"""The step of a single stage: as :data:`Close`, but it also computes the layers' input, with which
it calls its argument."""
Around = Callable[[Callable[[Any], Any], Any], Any]
"""Runs layers (first argument) on another form of their input (second); returns the output."""
Leaves = Mapping[str, Tensor] | None
"""Weights of a minibatch by parameter name. For missing ones, or all if None, the module's own
parameters are used."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A minibatch that went forward through a stage; made by :class:`StageLayers`.

    The tensors of ``output`` are cut from the graph; those that required a gradient still do.

    Attributes:
        call: calls a function while the stage's parameters are the given weights.
        inputs: differentiable tensors of the input, as leaves, until the backward.
        roots: loss, or the output's differentiable tensors, with their graph, until the backward.
        output: output of the stage's layers, a pytree; None in the last stage.
        loss: scalar without graph; None in other stages.
        extra: what the last stage's step returned besides the loss.
    """

    call: Callable[[Leaves, Callable[[], Any]], Any]
    inputs: Sequence[Tensor] = ()
    roots: Sequence[Tensor] | None
    output: Any = None
    loss: Tensor | None = None
    extra: Any = None

    def backward(
        self, gradients: Sequence[Tensor | None] | None, *, leaves: Leaves = None
    ) -> list[Tensor | None]:
        """Runs the backward, which adds to the gradients of ``leaves``, and frees the graph.

        Args:
            gradients: gradients of the output's differentiable tensors, each once, in the tree's
                order (:func:`~sparsepipe.runtime.transport.serialization.differentiable`), with
                None for a missing one. In the last stage, that of the loss alone; None: 1.
            leaves: the forward's weights, with which recomputed layers run again.

        Returns:
            Gradients of the input's differentiable tensors, in that order; None for a missing one.
        """
        assert self.roots is not None, "the graph is gone"
        roots, self.roots = self.roots, None
        pairs: list[tuple[Tensor, Tensor | None]] = [(root, None) for root in roots]
        if gradients is not None:
            pairs = [pair for pair in zip(roots, gradients, strict=True) if pair[1] is not None]
        if pairs:
            tensors, values = zip(*pairs, strict=True)
            self.call(leaves, lambda: torch.autograd.backward(tensors, values))
        found = [leaf.grad for leaf in self.inputs]
        self.inputs = ()
        return found


class StageLayers:
    """Consecutive entries of an ``nn.Sequential``, run on given weights.

    Buffers are the module's own: batch norms update their statistics in place, once for each
    forward, with or without recomputation.

    Args:
        module: module that parameter names refer to, such as the LightningModule or ``layers``.
        first: index of the first entry.
        last: index of the last entry.
        autocast: makes the context in which the layers run, such as one of mixed precision.
        randomness: seeds the random draws of each layer; None leaves the generators as they are.
        recomputed: spans of these entries, in order, that keep only their input in training and
            run again in the backward pass.
        around: runs the layers on another form of their input, such as shards of samples.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: nn.Sequential,
        *,
        first: int,
        last: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        randomness: KeyedRandomness | None = None,
        recomputed: Sequence[range] = (),
        around: Around | None = None,
    ) -> None:
        assert 0 <= first <= last < len(layers), (first, last, len(layers))
        self._caller = _Caller()
        self._caller.add_module("module", module)
        self._layers = layers
        self._autocast = autocast
        self._randomness = randomness
        self._recomputed = {
            span.start: RecomputedSpan(layers, span, randomness=randomness) for span in recomputed
        }
        # The entries, cut where recomputed spans begin and end.
        inner = (edge for each in recomputed for edge in (each.start, each.stop))
        self._parts = [range(a, b) for a, b in pairwise(sorted({first, last + 1, *inner}))]
        assert all(part in self._parts for part in recomputed), (first, last, recomputed)
        assert (self._parts[0].start, self._parts[-1].stop) == (first, last + 1), recomputed
        self._around = around

    def forward(
        self,
        value: Any,
        *,
        minibatch: int,
        leaves: Leaves = None,
        close: Close | None = None,
        whole: Step | None = None,
    ) -> Flight:
        """Runs the layers on a minibatch in training.

        Args:
            value: input of the layers, a pytree. The backward returns gradients of its tensors that
                require one, whether or not they are part of a graph.
            minibatch: number of the minibatch or microbatch in the whole run, for ``randomness``.
            leaves: weights of the minibatch.
            close: step that the last of several stages runs around its layers.
            whole: step of a single stage, which makes the layers' input in place of ``value``.
        """
        inputs = differentiable(value)
        if inputs:  # else the value stays as it is, with the caches of its sparse tensors
            given, inputs = inputs, [tensor.detach().requires_grad_() for tensor in inputs]
            entered = [_Entry.apply(leaf) for leaf in inputs]  # type: ignore[no-untyped-call]
            value = _replaced(value, given, entered)
        run = partial(self._run_layers, minibatch=minibatch)
        around = whole if close is None else close
        if around is not None:
            with self._autocast():
                ran = run if close is None else partial(run, value)
                loss, extra = self._call(leaves, partial(around, ran))
            if any(each.grad is not None for each in (*inputs, *(leaves or {}).values())):
                raise ConfigError(
                    "training_step calls backward, but only the gradients of the loss that it "
                    "returns go to the other stages",
                    remedy="add to the loss, or use torch.autograd.grad",
                )
            return Flight(
                call=self._call, inputs=inputs, roots=[loss], loss=loss.detach(), extra=extra
            )
        with self._autocast():
            output = self._call(leaves, partial(run, value))
        roots = differentiable(output)
        apart = (root.data if isinstance(root, nn.Parameter) else root.detach() for root in roots)
        cut = _replaced(output, roots, [each.requires_grad_() for each in apart])
        return Flight(call=self._call, inputs=inputs, roots=roots, output=cut)

    def evaluate(
        self,
        value: Any,
        *,
        close: Callable[[Callable[[], Any]], Any] | None = None,
        whole: Callable[[Callable[[Any], Any]], Any] | None = None,
    ) -> Any:
        """Returns the layers' output with the module's own parameters, or the result of the step
        around them, which ``close`` and ``whole`` give as in :meth:`forward`.
        """
        run = partial(self._run_layers, minibatch=None)
        with self._autocast():
            if whole is not None:
                return whole(run)
            return run(value) if close is None else close(partial(run, value))

    def _call(self, leaves: Leaves, function: Callable[[], Any]) -> Any:
        """Calls a function while the module's parameters are ``leaves``."""
        if not leaves:
            return function()
        named = {f"module.{name}": leaf for name, leaf in leaves.items()}
        return functional_call(self._caller, named, (function,))

    def _run_layers(self, value: Any, *, minibatch: int | None) -> Any:
        keyed = self._randomness if minibatch is not None else None

        def through(part: range, value: Any) -> Any:
            for layer, entry in zip(part, islice(self._layers, part.start, part.stop), strict=True):
                if keyed is not None and minibatch is not None:
                    keyed.key(minibatch=minibatch, layer=layer)
                value = entry(value)
            return value

        def compute(value: Any) -> Any:
            with nullcontext() if keyed is None else keyed.preserved():
                for part in self._parts:
                    span = self._recomputed.get(part.start) if minibatch is not None else None
                    if span is None:
                        value = through(part, value)
                    else:
                        value = span(value, partial(through, part))
            return value

        return compute(value) if self._around is None else self._around(compute, value)


class _Caller(nn.Module):
    """Calls any function through a module, as ``functional_call`` requires."""

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class _Entry(torch.autograd.Function):
    """Turns a leaf into a non-leaf of the same values, which layers may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _replaced(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    by_id = {id(a): b for a, b in zip(old, new, strict=True)}
    return pytree.tree_map(lambda x: by_id.get(id(x), x), tree)
