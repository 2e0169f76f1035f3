"""Values of many runs as one table of pandas, and the same table as text.

Columns have a type of four, whatever runs lack: truth, whole numbers, numbers, text. What fits
none of the first three is text: lists and mappings as JSON, and all values of a column in which
runs have values of unlike types, such as ``parallel.devices`` (``auto`` and 2).

In text a cell says by itself what it is: nothing is a missing value, what reads as JSON is that
value, and all else is text as it stands. Text that would be taken for something else is quoted as
JSON is, so that ``"12"`` is text, and 12 a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsepipe.results.columns import Dtype, known_dtype, ordered

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]
_LARGEST = 2**63 - 1
_FITTING: Mapping[Dtype, frozenset[Dtype]] = {
    "boolean": frozenset({"boolean"}),
    "Int64": frozenset({"Int64"}),
    "float64": frozenset({"Int64", "float64"}),
}
"""Types of values that a column of a type takes as they are; text takes all."""


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The table of some rows, which may have unlike keys.

    What is None or missing, or a number that is not finite, is missing in the table.
    """
    import pandas as pd

    names = ordered(name for row in rows for name in row)
    columns = {name: _column(name, [_finite(row.get(name)) for row in rows]) for name in names}
    return pd.DataFrame(
        {name: pd.Series(cells, dtype=dtype) for name, (dtype, cells) in columns.items()}
    )


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table, in plain values; None where one is missing."""
    import pandas as pd

    columns = {
        str(name): [None if pd.isna(value) else value for value in frame[name].tolist()]
        for name in frame.columns
    }
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def cell_text(value: Any) -> str:
    """A value of a table as text that :func:`cell_value` reads back equal."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value)
    as_it_stands = value.isprintable() and cell_value(value) == value
    return value if as_it_stands else json.dumps(value)


def cell_value(text: str) -> Any:
    """What a cell's text says."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if _finite(value) == value else text  # Infinity by itself is a word


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _column(name: str, values: Sequence[Any]) -> tuple[Dtype, list[Any]]:
    """The type of a column, and its values in that type."""
    kinds = {_kind(value) for value in values if value is not None}
    dtype = _dtype(known_dtype(name), kinds)
    if dtype == "string":
        return dtype, [None if value is None else _text(value) for value in values]
    if dtype == "float64":
        return dtype, [None if value is None else float(value) for value in values]
    return dtype, list(values)


def _dtype(known: Dtype | None, kinds: Iterable[Dtype]) -> Dtype:
    found = set(kinds)
    if known is not None and found <= _FITTING.get(known, found):
        return known
    return next((dtype for dtype, taken in _FITTING.items() if found and found <= taken), "string")


def _kind(value: Any) -> Dtype:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) and -_LARGEST <= value <= _LARGEST:
        return "Int64"
    return "float64" if isinstance(value, float) else "string"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode("utf-8")  # files take no half characters
