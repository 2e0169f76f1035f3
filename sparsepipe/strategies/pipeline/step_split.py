"""A module's step in two halves: before its call of ``layers``, and from that call on.

On one device it runs in one piece.

The first half runs where the batch is read, the second where the last layers are. The
second half runs the code before the call again, for what it needs of the batch later;
what it draws at random there it draws as the first did, from the global generators and from
those that :func:`generators_of` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.random_generators import (
    NUMPY,
    PYTHON,
    FormerStates,
    Generator,
    module_generators,
    set_states,
    states_before_draws,
    states_of,
    swap_states,
)

_CUDA = "torch.cuda"  # on ranks with such a device only


def generators_of(module: nn.Module | None, layers: nn.Sequential) -> dict[str, Generator]:
    """Random generators that a step may use outside of its layers, by names common to all ranks.

    The global generators of torch, numpy and python, and attributes of the module, if there is one,
    and of its children, but not of ``layers``: these draw where their entries run.
    """
    found: dict[str, Generator] = {
        "torch": torch.default_generator,
        "numpy": NUMPY,
        "python": PYTHON,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found[_CUDA] = torch.cuda.default_generators[torch.cuda.current_device()]
    if module is None:
        return found
    for path, child in module.named_modules(memo={layers}):  # all but the layers
        prefix = f"self.{path}." if path else "self."
        found |= {prefix + name: value for name, value in module_generators(child)}
    return found


def drawn_from(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """States before a step of those generators that it drew from.

    Raises:
        ConfigError: the step made a generator.
    """
    for name in sorted(after.keys() - before.keys() - {_CUDA}):
        raise ConfigError(
            f"the step makes a random generator, {name}, and the last stage would make another",
            remedy="make it in __init__, so that every rank has it before its first step",
        )
    return states_before_draws(before, after)


def put_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> FormerStates:
    """Sets states of another rank's; those that they replace.

    Raises:
        ConfigError: a generator is not on this rank.
    """
    missing = sorted(states.keys() - generators.keys() - {_CUDA})
    if missing:
        raise ConfigError(
            f"the step draws from {missing[0]}, which is a random generator on the first stage "
            "and none on the last",
            remedy="make it in __init__, on every rank",
        )
    return swap_states(
        (generators[name], state) for name, state in states.items() if name in generators
    )


_ONCE = "call it exactly once in each step, with one argument"


class _Called(BaseException):
    """Carries the input of ``layers`` out of a step, past its ``except Exception``."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The result of the first half of a step.

    Attributes:
        value: the input of ``layers``.
        randomness: states before the step of the random generators that it drew from.
    """

    value: Any
    randomness: Mapping[str, Any]


def run_until_layers(
    layers: nn.Sequential, step: Callable[[], Any], *, module: nn.Module | None = None
) -> Opened:
    """Runs a step up to its call of ``layers``.

    Raises:
        ConfigError: it does not call them, its input needs a gradient, or it makes a random
            generator.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise _Called(_only(args, kwargs))

    before = states_of(generators_of(module, layers))
    try:
        with _in_place_of(layers, forward):
            step()
    except _Called as called:
        _check_input(called.value)
        after = states_of(generators_of(module, layers))
        return Opened(value=called.value, randomness=drawn_from(before, after))
    raise ConfigError("the step does not call layers", remedy=_ONCE)


def run_from_layers(
    layers: nn.Sequential,
    step: Callable[[], Any],
    *,
    run: Callable[[], Any],
    module: nn.Module | None = None,
    randomness: Mapping[str, Any] | None = None,
    input_sent: bool = True,
) -> Any:
    """Runs a step with ``run()`` in place of ``layers``; what the step returns.

    The input in its batch may have no data, unless ``input_sent``. Random generators start from the
    states ``randomness`` (:attr:`Opened.randomness`).

    Raises:
        ConfigError: ``layers`` is called twice or not at all, the step needs the input's data
            apart from that call, or draws from a generator that is not on this rank.
    """
    calls = 0
    own: FormerStates = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigError("the step calls layers twice", remedy=_ONCE)
        _only(args, kwargs)
        set_states(own)
        return run()

    if randomness:
        own = put_states(generators_of(module, layers), randomness)
    try:
        with _in_place_of(layers, forward):
            result = step()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if input_sent or "meta" not in str(error):
            raise
        raise _needs_input() from error
    if not calls:
        raise ConfigError("the step does not call layers", remedy=_ONCE)
    leaves = pytree.tree_leaves(result)
    if not input_sent and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
        raise _needs_input()
    return result


def run_through(
    layers: nn.Sequential, step: Callable[[], Any], *, run: Callable[[Any], Any]
) -> Any:
    """Runs a step in one piece, with ``run`` in place of ``layers``; what the step returns.

    Raises:
        ConfigError: ``layers`` is called twice or not at all, or its input needs a gradient.
    """
    called = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if called:
            raise ConfigError("the step calls layers twice", remedy=_ONCE)
        called = True
        value = _only(args, kwargs)
        _check_input(value)
        return run(value)

    with _in_place_of(layers, forward):
        result = step()
    if not called:
        raise ConfigError("the step does not call layers", remedy=_ONCE)
    return result


def without_input(batch: Any, value: Any) -> Any:
    """A batch with tensors without data (of device "meta") where it shares the input's memory.

    A sparse tensor, or another node that is no plain container, is left out as a whole.
    """
    storages = set(map(_memory, _tensors(value))) - {0}

    def strip(unit: Any) -> Any:
        if storages.isdisjoint(map(_memory, _tensors(unit))):
            return unit
        return pytree.tree_map_only(Tensor, _without_data, unit)

    return pytree.tree_map(strip, batch, is_leaf=lambda node: not isinstance(node, _CONTAINERS))


_CONTAINERS = (list, tuple, dict)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Where a tensor's data are; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _in_place_of(layers: nn.Sequential, forward: Callable[..., Any]) -> Iterator[None]:
    layers.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layers.forward


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs:
        given = len(args) + len(kwargs)
        raise ConfigError(f"the step calls layers with {given} arguments", remedy=_ONCE)
    return args[0]


def _check_input(value: Any) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ConfigError(
                "the input of layers needs a gradient: the step uses parameters before it calls "
                "layers",
                remedy="move the modules it uses there to the front of the Sequential",
            )


def _needs_input() -> ConfigError:
    return ConfigError(
        "the step uses the input of layers apart from calling them, and its data stay on the "
        "first stage",
        remedy="set send_input=true on the strategy, which sends it to the last stage too",
    )
