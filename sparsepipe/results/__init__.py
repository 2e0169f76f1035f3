"""The ledger of runs: plain values in, tables, figures and files out.

``load_results`` reads the results of many runs as one table, ``gather`` writes it. ``files``
writes atomically, ``metrics`` reads a run's metrics back, ``timeline`` draws schedules with
characters; ``curves``, ``comparison``, ``confusion``, ``gallery`` and ``timeline_picture`` draw
pictures. Only the last five import matplotlib, and this package imports none of them, nor pandas
before a ledger is read, so that writing a file stays cheap. ``paper`` has what the paper prints,
``report`` sets ours beside it.
"""

from sparsepipe.results.ledger import gather, load_results

__all__ = ["gather", "load_results"]
