"""The ledger of runs: plain values in, tables, figures and files out.

``files`` writes atomically, ``metrics`` reads a run's metrics back, ``curves``,
``confusion`` and ``gallery`` draw. Only the last three import matplotlib, and this
package imports none of them, so that writing a file stays cheap.
"""
