"""Lightning callbacks: checkpoints, stops, the metrics file, step times, traces and progress."""

from sparsepipe.callbacks.checkpoint import KeepPlan, RunCheckpoint
from sparsepipe.callbacks.finite import FiniteOnly
from sparsepipe.callbacks.metrics import EpochSums, MetricsCsv
from sparsepipe.callbacks.progress import EpochLines, ShapesProgressBar, Throughput
from sparsepipe.callbacks.resumable_loading import ResumableLoaders, Resume
from sparsepipe.callbacks.shards import WriteShards
from sparsepipe.callbacks.stop import ErrorNotes, StopOnSignal
from sparsepipe.callbacks.timing import BusyTimes, StepTimer
from sparsepipe.callbacks.trace import Measured, Trace

__all__ = [
    "BusyTimes",
    "EpochLines",
    "EpochSums",
    "ErrorNotes",
    "FiniteOnly",
    "KeepPlan",
    "Measured",
    "MetricsCsv",
    "ResumableLoaders",
    "Resume",
    "RunCheckpoint",
    "ShapesProgressBar",
    "StepTimer",
    "StopOnSignal",
    "Throughput",
    "Trace",
    "WriteShards",
]
