"""Lightning callbacks of the house: checkpoints, stops, the metrics file, throughput, progress."""

from sparsepipe.experiment.callbacks.busy import Busy
from sparsepipe.experiment.callbacks.checkpoint import Resume, RunCheckpoint
from sparsepipe.experiment.callbacks.epoch_sums import EpochSums
from sparsepipe.experiment.callbacks.metrics_csv import MetricsCsv
from sparsepipe.experiment.callbacks.place import NamePlace
from sparsepipe.experiment.callbacks.plan import KeepPlan
from sparsepipe.experiment.callbacks.progress import EpochLines, ShapesProgressBar
from sparsepipe.experiment.callbacks.pulse import Pulse
from sparsepipe.experiment.callbacks.rates import LogRates
from sparsepipe.experiment.callbacks.stop import StopAtOnce, StopOnSignal
from sparsepipe.experiment.callbacks.throughput import Throughput

__all__ = [
    "Busy",
    "EpochLines",
    "EpochSums",
    "KeepPlan",
    "LogRates",
    "MetricsCsv",
    "NamePlace",
    "Pulse",
    "Resume",
    "RunCheckpoint",
    "ShapesProgressBar",
    "StopAtOnce",
    "StopOnSignal",
    "Throughput",
]
