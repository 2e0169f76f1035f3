"""The ledger of runs: plain values in, tables, figures and files out.

``files`` writes atomically, ``metrics`` reads a run's metrics back, ``timeline`` draws
schedules with characters; ``curves``, ``comparison``, ``confusion``, ``gallery`` and
``timeline_picture`` draw pictures. Only the last five import matplotlib, and this package
imports none of them, so that writing a file stays cheap.
"""
