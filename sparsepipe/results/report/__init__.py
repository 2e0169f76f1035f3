"""Reports: ours beside the paper's printed figures, cell by cell.

``cell`` defines a place in a table, ``exhibit`` a table or figure of the paper; ``table1``,
``table2``, ``table3``, ``fig7``, ``fig8`` and ``fig9`` are one file of data and selection each;
``markdown``, ``spreadsheet``, ``picture`` and ``page`` write them, and ``writing`` all of it.
"""
