"""Environment variables for the processes that are started meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def set_within(values: Mapping[str, str], *, restored: tuple[str, ...] = ()) -> Iterator[None]:
    """Sets variables while the block runs; then all are as they were.

    Args:
        values: by name.
        restored: others that the block may change and leave so.
    """
    before = {name: os.environ.get(name) for name in (*values, *restored)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
