"""The typed schema of the configuration: a dataclass for each group with fixed keys.

A :class:`Node` is a mapping with ``_target_``. Its keys are checked against the signature of the
callable that it names, so that users' own classes are checked like those of SparsePipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator

from sparsepipe.config.target import Target
from sparsepipe.utils.extensions import DottedPath
from sparsepipe.utils.process import MatmulPrecision

Search = Literal["dp", "mp", "variance", "straight", "hete_mp", "exact", "exhaustive"] | DottedPath
Buildable = Annotated[Target, PlainValidator(Target.parse)]
"""A mapping with a ``_target_``."""
_FIXED = ConfigDict(extra="forbid", strict=True)
"""Dataclasses take only their fields as keys, and only values of the fields' types."""


_Place = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """What the schema says about a node in addition to the signature of its target.

    Args:
        given: parameters of the target that SparsePipe passes, so that they are not required.
        own: dataclass of keys that SparsePipe reads itself, besides the target's parameters.
        elsewhere: parameters of other targets, each with a hint about which option to choose.
    """

    given: tuple[str, ...] = ()
    own: type | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)


LONGEST_S = 1e9
"""The longest time in seconds that ranks may be set to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Directories of data sets, of caches and of runs."""

    __pydantic_config__ = _FIXED
    data: _Place
    cache: _Place
    outputs: _Place


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """How a model is split into stages: by a plan file, by hand, or into equal shares."""

    __pydantic_config__ = _FIXED
    file: str | None = None
    config: str | int | None = None  # YAML reads that of one stage, such as 2, as a number
    cuts: list[int] | None = None
    balance: Literal["flops", "parameters", "layers"] = "flops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Numbers of passes and batches that measure a device without a profile (``task=profile``)."""

    __pydantic_config__ = _FIXED
    num_warmup: Annotated[int, Field(ge=0, le=1_000_000)] = 5
    num_measured: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    num_batches: Annotated[int, Field(ge=1, le=1_000_000)] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChoice:
    """How a plan is searched for, by ``task=partition`` or for a training.

    ``conf/base/search.yaml`` explains the keys. With ``search: null`` nothing is searched for; the
    cost model is one of :mod:`sparsepipe.partition.costs.model`.
    """

    __pydantic_config__ = _FIXED
    search: Search | None = "hete_mp"
    cost_model: str = "sparsepipe_hete"
    order: str | list[str] = "by_count"
    device: str | None = None
    levels: bool = False
    bandwidth_bytes_per_s: float | None = None
    profiles: dict[str, str] | None = None
    memory: bool = True
    stash: bool | None = None
    optimizer_bytes: float | None = None
    reserved_bytes: float = 0.0
    measure: Measuring = field(default_factory=Measuring)


_OF_SYNCHRONOUS = dict.fromkeys(
    ("batch_norm", "microbatches", "recompute", "schedule"),
    "a setting of synchronous pipelines: choose parallel=gpipe, sync_1f1b or eager_1f1b",
)


MICROBATCHES_KEY = "parallel.strategy.microbatches"
"""Configuration key for the number of microbatches."""


@dataclass(frozen=True, slots=True)
class Synchronous:
    """A synchronous schedule.

    Args:
        schedule: its name, as in :func:`sparsepipe.schedule.synchronous_by_name`.
        microbatches: number of microbatches in a minibatch.
    """

    schedule: str
    microbatches: int

    @property
    def option(self) -> str:
        """The option of the group ``parallel`` with this schedule."""
        return "sync_1f1b" if self.schedule == "1f1b" else self.schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How many devices train, with which strategy, and what happens when one fails."""

    __pydantic_config__ = _FIXED
    devices: int | str
    num_nodes: int
    grace_s: Annotated[float, Field(ge=0, le=LONGEST_S)]
    strategy: (
        Annotated[
            Buildable,
            Node(
                given=("cluster_environment", "config", "cuts", "balance"),
                elsewhere=_OF_SYNCHRONOUS,
            ),
        ]
        | None
    )
    plan: PlanChoice | None = None
    search: SearchChoice | None = None
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    grid: list[int] | Literal["auto"] | None = None
    replicas: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    roles: Literal["equal", "separate"] | None = None

    @property
    def synchronous(self) -> Synchronous | None:
        """The strategy's schedule; None unless it is a synchronous pipeline."""
        arguments = {} if self.strategy is None else self.strategy.arguments
        if not {"schedule", "microbatches"} <= arguments.keys():
            return None
        return Synchronous(arguments["schedule"], arguments["microbatches"])

    @property
    def recompute(self) -> str | Mapping[str, Any]:
        """Layers that a synchronous pipeline recomputes; ``none`` for other strategies."""
        found: str | Mapping[str, Any] = "none"
        return found if self.synchronous is None else self.argument("recompute", found)

    @property
    def splits(self) -> bool:
        """Whether the strategy splits models into stages."""
        strategy = self.strategy
        return strategy is not None and {"config", "cuts"} <= set(strategy.parameters.types)

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device trains the whole model on different samples."""
        others = (self.plan, self.grid, self.roles)
        return self.strategy is not None and all(each is None for each in others)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument of the strategy; ``default`` without a strategy or without the argument."""
        return default if self.strategy is None else self.strategy.get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """Optimizer, schedule of its learning rate, and label smoothing of a training."""

    __pydantic_config__ = _FIXED
    label_smoothing: Annotated[float, Field(ge=0, le=1)]
    optimizer: Annotated[Buildable, Node(given=("params",))]
    schedule: Annotated[Buildable, Node()] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Weights of classes, and further terms, in the loss that a plain network minimises."""

    __pydantic_config__ = _FIXED
    class_weights: Literal["balanced"] | list[Annotated[float, Field(ge=0)]] | None = None
    lovasz: Annotated[float, Field(ge=0)] = 0.0
    dice: Annotated[float, Field(ge=0)] = 0.0


KeptCheckpoints = Literal["best", "last", "both", "none"]
"""Checkpoints that a finished run keeps."""
OWN_TRAINER_KEYS = ("checkpoints", "matmul_precision", "nonfinite", "trace")
"""Keys of ``trainer`` that are not arguments of Lightning's Trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """The arguments of Lightning's Trainer that no other group sets, and four other keys."""

    __pydantic_config__ = _FIXED
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: str | dict[str, int] | None
    precision: str | int | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    accumulate_grad_batches: int
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: int | float
    val_check_interval: int | float | str | dict[str, int] | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | None
    fast_dev_run: int | bool
    log_every_n_steps: int | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    deterministic: bool | str | None
    benchmark: bool | None
    inference_mode: bool
    detect_anomaly: bool
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    profiler: Any
    plugins: Any
    barebones: bool
    model_registry: str | None
    enable_autolog_hparams: bool
    checkpoints: KeptCheckpoints = "both"
    matmul_precision: MatmulPrecision | None = None
    nonfinite: Literal["stop", "warn"] = "stop"
    trace: bool = False

    def built(self) -> dict[str, Any]:
        """The Trainer's arguments by name; ``profiler`` and ``plugins`` are built if nodes."""
        names = (entry.name for entry in fields(self) if entry.name not in OWN_TRAINER_KEYS)
        found = {name: getattr(self, name) for name in names}
        for name in ("profiler", "plugins"):
            if isinstance(found[name], Mapping):
                found[name] = Target.parse(found[name]).build()
        return found

    @property
    def batches_limit(self) -> int | None:
        """Limit on the minibatches of each rank that reads data; None: a share, or no limit."""
        limit = self.limit_train_batches
        return limit if isinstance(limit, int) and limit > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """Keys of ``hardware`` for its emulation; the other keys build the inventory."""

    __pydantic_config__ = _FIXED
    emulate: bool = False  # train on CPUs with the times of profiles; docs/emulation.md
    time_scale: Annotated[float, Field(ge=0.001, le=10_000)] = 1.0  # how many times slower it runs
    network: Literal["auto", "namespaces", "loopback"] = "auto"  # auto: namespaces where allowed
    link_bytes_per_s: Annotated[float, Field(ge=1, le=1e15)] | None = None  # null: the inventory's


DomainTraining = Literal[
    "source_only",
    "supervised",
    "dsn",
    "dann",
    "without_difference",
    "without_reconstruction",
    "without_similarity",
    "with_mse",
]
"""Ways to train networks of several domains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperStudy:
    """Keys from which the paper's studies compute settings of a run; runs do not record them."""

    __pydantic_config__ = _FIXED
    instead_of_scale: dict[str, list[str]] | None = None  # overrides in place of each scale
    batch_shared_by: int | str | None = None  # devices that share data.batch_size of a scale
    depth: Annotated[int, Field(ge=1, le=1024)] | None = None  # stages, of paper/depth
    partition: Search | None = None  # parallel.search.search of pipelines of paper/schedule
    extent: Literal["smoke", "desk", "paper"] | None = None  # sizes of samples and networks
    workers: Literal["one", "fewer", "most"] | None = None  # number of workers that share a network
    training: DomainTraining | None = None  # of networks of several domains, in multi_dsn


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The cell of a table or figure that a run fills; recorded, but not part of its run id."""

    __pydantic_config__ = _FIXED
    exhibit: str | None = None  # name of a chapter of reports
    cell: dict[str, Any] = field(default_factory=dict)  # values that are swept, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    __pydantic_config__ = _FIXED
    name: str
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)]  # what numpy's generator takes
    representation: Literal["sparse", "dense"]
    force: bool
    checkpoint: str | None
    objective: str | None
    paths: Paths
    parallel: Parallel
    optim: Optim
    trainer: TrainerArguments
    task: Annotated[Buildable, Node(given=("run", "directories", "width"))]
    model: Annotated[Buildable, Node(given=("num_classes", "class_names", "domains"))]
    data: Annotated[Buildable, Node()]
    hardware: Annotated[Buildable, Node(own=Emulation)]
    backend: Annotated[Buildable, Node()]
    logger: dict[str, Annotated[Buildable, Node(given=("run_id", "run_dir", "job_type"))]]
    callbacks: dict[str, Annotated[Buildable, Node()]]
    loss: Loss = field(default_factory=Loss)
    checkpoint_strict: bool = True
    input: str | None = None
    tags: tuple[str | int | float, ...] = ()
    scale: str | None = None
    from_run: str | None = None  # configuration file of the run given with --from; not recorded
    paper: PaperStudy | None = None  # not recorded in runs
    study: Study | None = None
    runs: list[Any] = field(default_factory=list)  # of task=compare; not recorded either
