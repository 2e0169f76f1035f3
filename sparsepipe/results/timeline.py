"""What several workers do over time, as text: a lane for each, a bar for each action."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Row = tuple[str, int, int | None, float, float]
"""(kind, number, microbatch, start, end): kind is F forward, B backward or U update; or, in a lane
of messages, a activation, g gradient or S sum of gradients."""

Lane = tuple[str, Sequence[Row]]
"""A worker's name and its rows."""

_FILL = {"F": " ", "B": "-", "U": "=", "a": ">", "g": "<", "S": "+"}


def is_of_messages(rows: Sequence[Row]) -> bool:
    """Whether a lane shows what is on its way; what is computed is in lanes of its own."""
    return bool(rows) and all(row[0] in "agS" for row in rows)


def label(row: Row) -> str:
    """A bar's name, such as F3 or B3.1."""
    kind, number, microbatch, _, _ = row
    return f"{kind}{number}" if microbatch is None else f"{kind}{number}.{microbatch}"


def rows_until(lanes: Iterable[Lane], until: float | None) -> list[tuple[str, list[Row]]]:
    """The lanes without the rows that begin at ``until`` or later.

    A row without duration, such as an update that takes no time, may also lie at ``until``.
    """
    limit = math.inf if until is None else until
    return [
        (name, [row for row in rows if row[3] < limit or row[3] == row[4] == limit])
        for name, rows in lanes
    ]


def timeline_text(lanes: Sequence[Lane], *, unit: float = 1.0, until: float | None = None) -> str:
    """Draws lanes with characters.

    Two stages, two minibatches, for example::

        time    0  1  2  3  4  5  6  7  8  9
        stage 0 |F0|F1|.....|B0---U..|B1---U
        stage 1 ...|F0|B0---UF1|B1---U

    Bars of backwards are filled with ``-``, waiting with ``.``; where an update that takes
    no time follows a bar, U stands in place of its border.

    Args:
        lanes: who does what when.
        unit: time from one tick to the next.
        until: where the drawing ends, if earlier than the last row.
    """
    drawn = rows_until(lanes, until)
    rows = [row for _, found in drawn for row in found]
    bars = [row for row in rows if row[4] > row[3]]
    # Every name fits its bar, and one more character is its border.
    width = max((math.ceil((len(label(r)) + 1) * unit / (r[4] - r[3])) for r in bars), default=1)
    end = min(max((row[4] for row in rows), default=0.0), math.inf if until is None else until)
    ticks = math.ceil(end / unit - 1e-9) + 1
    width = max(width, len(str(ticks - 1)) + 1)
    names = max((len(name) for name, _ in drawn), default=0)
    names = max(names, len("time")) + 1
    head = "time".ljust(names) + "".join(str(t).ljust(width) for t in range(ticks))
    shown = None if until is None else round(until * width / unit) + 1
    body = [
        name.ljust(names) + _lane(found, columns_per_time=width / unit)[:shown]
        for name, found in drawn
    ]
    return "\n".join(line.rstrip() for line in [head, *body]) + "\n"


def _lane(rows: Sequence[Row], *, columns_per_time: float) -> str:
    def place(time: float) -> int:
        return round(time * columns_per_time)

    line = ["."] * (max((place(row[4]) for row in rows), default=0) + 1)
    for row in rows:
        start, end = place(row[3]), place(row[4])
        if end > start:
            inside = end - start - 1
            line[start] = line[end] = "|"
            line[start + 1 : end] = label(row).ljust(inside, _FILL[row[0]])[:inside]
    for row in rows:
        if place(row[4]) == place(row[3]):
            line[place(row[3])] = row[0]
    if line[-1] == ".":
        line.pop()
    return "".join(line)
