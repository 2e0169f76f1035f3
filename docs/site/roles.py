"""An extension of griffe: references of docstrings, written as :func:`name`, become links."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, GriffeError, Module, Object

_ROLE = re.compile(r":(?:mod|func|class|meth|attr|data|obj|exc):`(~?)([^`]+)`")


class Roles(Extension):
    """Replaces roles once a package is loaded, so that names in it can be looked up."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        _replace(pkg)


def _replace(of: Object) -> None:
    if of.docstring is not None:
        of.docstring.value = _ROLE.sub(lambda role: _link(of, *role.groups()), of.docstring.value)
    for member in of.members.values():
        if not member.is_alias:
            _replace(member)


def _link(of: Object, short: str, name: str) -> str:
    """What is not documented, such as a private name, stays text."""
    try:
        path = of.resolve(name)
    except GriffeError:
        path = name.lstrip(".")
    shown = name.rpartition(".")[2] if short else name.lstrip(".")
    return f'<autoref identifier="{path}" optional>`{shown}`</autoref>'
