"""Reports: our figures beside printed ones, cell by cell.

``chapter`` defines a table of such cells, ``tables`` which runs may stand in one, and the command
that fills it; ``measurements`` takes figures of finished runs; ``dot_plot`` and ``documents`` show
a filled chapter, and ``writing`` writes all of them. The chapters of papers are in
:mod:`sparsepipe.paper.chapters`, which also says how another package adds one.
"""
