"""Reports: ours beside the paper's printed figures, cell by cell.

``exhibit`` defines what a table or figure of the paper is; ``table1``, ``table2``, ``table3``,
``fig7``, ``fig8`` and ``fig9`` are one file of data and selection each; ``markdown``,
``spreadsheet``, ``picture`` and ``page`` write them, and ``writing`` all of it.
"""
