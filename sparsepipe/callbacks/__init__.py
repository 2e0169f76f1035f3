"""Lightning callbacks: checkpoints, stops, the metrics file, throughput, progress."""

from sparsepipe.callbacks.busy import Busy
from sparsepipe.callbacks.checkpoint import KeepPlan, Resume, RunCheckpoint
from sparsepipe.callbacks.metrics import EpochSums, LogRates, MetricsCsv
from sparsepipe.callbacks.progress import EpochLines, ShapesProgressBar, Throughput
from sparsepipe.callbacks.stop import NamePlace, Pulse, StopAtOnce, StopOnSignal

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
