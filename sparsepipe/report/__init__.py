"""Reports: our figures beside printed ones, cell by cell.

``chapter`` defines a table of such cells, ``tables`` says which runs may stand in one,
``measurements`` takes figures of finished runs, ``dot_plot`` draws and ``documents`` writes them.
The chapters of papers are in :mod:`sparsepipe.paper.chapters`.
"""
