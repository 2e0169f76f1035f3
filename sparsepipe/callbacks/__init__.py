"""Lightning callbacks of the house: checkpoints, stops, the metrics file, throughput, progress."""

from sparsepipe.callbacks.busy import Busy
from sparsepipe.callbacks.checkpoint import Resume, RunCheckpoint
from sparsepipe.callbacks.epoch_sums import EpochSums
from sparsepipe.callbacks.metrics_csv import MetricsCsv
from sparsepipe.callbacks.place import NamePlace
from sparsepipe.callbacks.plan import KeepPlan
from sparsepipe.callbacks.progress import EpochLines, ShapesProgressBar
from sparsepipe.callbacks.pulse import Pulse
from sparsepipe.callbacks.rates import LogRates
from sparsepipe.callbacks.stop import StopAtOnce, StopOnSignal
from sparsepipe.callbacks.throughput import Throughput

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
