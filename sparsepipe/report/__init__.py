"""Reports: our figures beside printed ones, cell by cell.

``chapter`` defines a table of such cells, ``commands`` the commands that fill them;
``measurements`` takes figures of finished runs; ``layout``, ``dot_plot`` and ``documents`` show a
filled chapter, and ``writing`` writes all of them. The chapters of papers are in
:mod:`sparsepipe.paper.chapters`, which also says how another package adds one.
"""
