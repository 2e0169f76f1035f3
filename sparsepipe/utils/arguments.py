"""Checks values against type hints, so that types, ranges and choices stand only in signatures."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from sparsepipe.errors import ConfigError

Count = Annotated[int, Field(ge=1, le=2**32)]
CountFrom0 = Annotated[int, Field(ge=0, le=2**32)]
"""A count that may be 0."""
Seed = Annotated[int, Field(ge=0)]
C = TypeVar("C", bound=Callable[..., Any])
_TERMS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid array": "a list",
    "a valid list": "a list",
    "an object": "a mapping",
    "Value should have at least 1 item after validation, not 0": "a list that is not empty",
    "String should have at least 1 character": "a path that is not empty",
}
"""Pydantic's terms for types, and the plainer terms that replace them in messages."""
_ANY_CLASS = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong_value(value: Any, hint: Any) -> str | None:
    """Returns text such as "must be a number" if ``value`` does not fit ``hint``, otherwise None.

    Args:
        value: a value of JSON's types, as YAML files contain them.
        hint: a type hint, which may limit numbers (:func:`pydantic.Field`).
    """
    adapter = _adapter(hint)
    try:
        if adapter is not None:
            adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        return in_words(error.errors(include_url=False))
    return None


def in_words(errors: Iterable[Mapping[str, Any]]) -> str:
    """Puts pydantic's errors about one value into words: "must be a whole number or text"."""
    written = [each["msg"] for each in errors if each["type"] != "needs_python_object"]
    texts = [text.partition("should be ")[2] or text for text in written]
    for theirs, ours in _TERMS.items():
        texts = [text.replace(theirs, ours) for text in texts]
    return f"must be {' or '.join(dict.fromkeys(texts)) or 'an object with a _target_'}"


def checked(target: C) -> C:
    """Decorates a function or dataclass so that arguments out of range raise a ConfigError.

    Only arguments whose hints have limits (:func:`pydantic.Field`) or ``Literal`` choices are
    checked. Checks of configurations use the same hints.
    """
    function = target.__init__ if inspect.isclass(target) else target
    signature = inspect.signature(function)

    adapters = functools.cache(  # evaluated at the first call, when all names exist
        lambda: {
            name: _adapter(hint)
            for name, hint in typing.get_type_hints(target, include_extras=True).items()
            if _has_limits(hint)
        }
    )

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        given = signature.bind(*args, **arguments).arguments
        for name, adapter in adapters().items():
            try:
                if name in given and adapter is not None:
                    adapter.validate_python(given[name])
            except ValidationError as error:
                raise ConfigError(
                    f"{name}={given[name]!r} is not valid: it "
                    f"{in_words(error.errors(include_url=False))}",
                    remedy=f"change {name} accordingly",
                ) from error
        return function(*args, **arguments)

    if not inspect.isclass(target):
        return typing.cast("C", call)
    target.__init__ = call  # type: ignore[method-assign]
    return target


def _has_limits(hint: Any) -> bool:
    is_limited = typing.get_origin(hint) in (Annotated, Literal)
    return is_limited or any(map(_has_limits, typing.get_args(hint)))


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(hint, config=_ANY_CLASS)
    except PydanticUserError:  # a type that pydantic cannot check or that configures its check
        return None
