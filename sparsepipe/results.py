"""Results of finished runs as a table, and the best of these runs.

``load_results`` reads the runs in a directory or a ledger file, ``gather`` writes the ledger of an
experiment, ``best`` finds the run with the best value in a column. See docs/results.md.
"""

from sparsepipe.runs.best import BestRun, best
from sparsepipe.runs.ledger import gather, load_results

__all__ = ["BestRun", "best", "gather", "load_results"]
