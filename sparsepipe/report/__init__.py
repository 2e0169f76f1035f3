"""Reports, which show our figures beside the paper's, cell by cell.

``chapter`` defines a table of such cells, ``tables`` groups the runs of a table, ``measurements``
takes figures from finished runs, ``dot_plot`` draws them and ``documents`` writes them.
The chapters of papers are in :mod:`sparsepipe.paper.chapters`.
"""
