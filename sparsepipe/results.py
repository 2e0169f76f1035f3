"""Results of finished runs: all of them as a table, and the best of them.

``load_results`` reads the runs of a directory or a ledger's file, ``gather`` writes the ledger of
an experiment, ``best`` finds the run to go on with. docs/results.md says what the columns mean.
"""

from sparsepipe.runs.best import BestRun, best
from sparsepipe.runs.ledger import gather, load_results

__all__ = ["BestRun", "best", "gather", "load_results"]
