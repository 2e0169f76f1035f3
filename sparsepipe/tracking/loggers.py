"""Weights & Biases, TensorBoard and MLflow, in addition to the metrics file that every run has."""

from __future__ import annotations

import configparser
import importlib.util
import netrc
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_fabric.loggers.logger import rank_zero_experiment
from lightning_fabric.utilities.rank_zero import rank_zero_only
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from typing_extensions import override

from sparsepipe.callbacks import Resume
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError, OutputError
from sparsepipe.tracking.history import STEP, History
from sparsepipe.utils.files import free_name

_PACKAGES = {f"{__name__}.{package}_logger": package for package in ("mlflow", "tensorboard")}
"""Optional package that each logger needs, by the path of the function that makes the logger."""
_SET_VARIABLES: dict[str, str] = {}
"""Environment variables that this process has set, for settings that ``wandb.init`` lacks."""
_BEGUN: set[str] = set()
"""Ids of the open Weights & Biases runs that loggers of this process have begun."""
_SWEEP, _RUN_ID, _GROUP = "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RUN_GROUP"
"""Environment variables with which a sweep agent chooses the run of its process."""
_PUBLIC_SERVER = ("api.wandb.ai", "api.forge.coreweave.com")
"""Old and new name of the public server: a login to one is a login to the other."""
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def wandb_logger(
    *,
    project: str,
    run_id: str,
    run_dir: Path,
    job_type: str,
    offline: bool = True,
    entity: str | None = None,
    group: str | None = None,
    tags: Sequence[str | int | float] = (),
) -> WandbRunLogger:
    """Returns a Weights & Biases logger that writes to the run's directory.

    A resumed run keeps its id. Under a sweep agent (``wandb agent``), id, project and entity are
    the agent's, and the group is the sweep's id. ``WANDB_RUN_GROUP`` takes precedence over any
    group. Offline, the logger only writes files and needs neither a login nor a network.
    """
    if not offline and not _has_login():
        raise ConfigError(
            "logger.wandb.offline=false needs a Weights & Biases login",
            remedy="run `wandb login`, set WANDB_API_KEY, or set logger.wandb.offline=true and "
            "upload the run later with `wandb sync`",
        )
    sweep = os.environ.get(_SWEEP)
    return WandbRunLogger(
        run_dir,
        offline=offline,
        project=project,
        entity=entity,
        id=os.environ.get(_RUN_ID) if sweep else run_id,
        name=run_id,
        resume=None if offline else "allow",
        group=os.environ.get(_GROUP) or sweep or group,
        job_type=job_type,
        tags=[str(tag) for tag in tags],
    )


def tensorboard_logger(*, run_dir: Path) -> TensorBoardLogger:
    """Returns a logger that writes event files to ``tensorboard/`` in the run's directory."""
    _require("tensorboard")
    return TensorBoardLogger(run_dir, name="tensorboard", version="", default_hp_metric=False)


def mlflow_logger(
    *,
    run_id: str,
    run_dir: Path,
    job_type: str,
    experiment: str = "sparsepipe",
    tracking_uri: str | None = None,
    tags: Sequence[str | int | float] = (),
) -> MLFlowLogger:
    """Returns a logger to the MLflow run with the name ``run_id``, which a resumed run continues.

    Without the ``tracking_uri`` of a server, MLflow writes to ``mlflow/`` in the run's directory.
    """
    _require("mlflow")
    from mlflow.tracking import MlflowClient

    # MLflow refuses to write files by default, since it prefers a database.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tracking_uri or (run_dir / "mlflow").absolute().as_uri()
    client = MlflowClient(uri)
    named = client.get_experiment_by_name(experiment)
    same = f"tags.`mlflow.runName` = '{run_id}'"
    runs = [] if named is None else client.search_runs([named.experiment_id], same)
    return MLFlowLogger(
        experiment_name=experiment,
        run_name=run_id,
        tracking_uri=uri,
        tags={"job_type": job_type, **dict.fromkeys(map(str, tags), "true")},
        run_id=runs[0].info.run_id if runs else None,
    )


def refuse_missing(loggers: Iterable[Target]) -> None:
    """Raises a ConfigError if the optional package of one of the loggers is not installed."""
    for each in loggers:
        if each.path in _PACKAGES:
            _require(_PACKAGES[each.path])


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"logger={package} needs {package}, which is not installed",
            remedy=f"run pip install 'sparsepipe[{package}]', or leave {package} out of logger=",
        )


class WandbRunLogger(WandbLogger):
    """Logs to one Weights & Biases run, even if the run is killed and resumed several times.

    Offline, ``wandb/`` in the run's directory holds one directory for each id: a run that resumes
    writes it anew from its :class:`History`, and the earlier one moves to ``wandb-earlier/``.
    Nothing is deleted. Online, the server keeps the rows. ``init``: further arguments of
    ``wandb.init``.
    """

    def __init__(self, run_dir: Path, *, offline: bool, **init: Any) -> None:
        super().__init__(save_dir=str(run_dir), offline=offline, **init)
        self._wandb_init.pop("anonymous", None)  # Weights & Biases warns about it
        self._folder = run_dir / "wandb"
        self._earlier = run_dir / "wandb-earlier"
        self._history = History(self._folder / "history.jsonl")
        self._resumes = False
        self._step = 0

    @rank_zero_only
    def resume(self, place: Resume, epochs: Sequence[Mapping[str, str]]) -> None:
        """Prepares resuming at ``place``; must be called before anything is logged.

        ``epochs``: the rows of the metrics file.
        """
        self._history.keep_copy(self._earlier)  # with the rows that will be repeated
        self._history.resume(place, epochs)
        self._resumes = True

    @property
    @rank_zero_experiment
    @override
    def experiment(self) -> Any:
        """The Weights & Biases run, which begins at the first access."""
        import wandb

        if self._experiment is None:
            run: Any = wandb.run  # another logger of the job may have begun this one's
            if run is None:
                is_own = False
            elif self._id is not None:
                is_own = run.id == self._id
            else:  # the agent has given no id
                is_own = run.sweep_id == os.environ.get(_SWEEP)
            run = run if is_own else self._begin()
            self._experiment, self._id = run, run.id
        return self._experiment

    @property
    def upload(self) -> str | None:
        """The shell command that uploads the run's files; None: the run is online."""
        return f"wandb sync {self._folder}" if self._offline else None

    def _begin(self) -> Any:
        import wandb

        end_tracking(failed=True)  # a run of an earlier job, which wandb.init would return
        if wandb.run is not None:
            raise ConfigError(
                f"another Weights & Biases run is open in this process: {wandb.run.id}",
                remedy="call wandb.finish() first, or leave out logger=wandb",
            )
        if not self._resumes:  # without a checkpoint everything is logged again
            self._history.keep_copy(self._earlier)
            self._history.clear()
        attempts = self._folder.glob(f"*run-*-{self._id}") if self._offline else ()
        for path in list(attempts):
            if path.is_dir() and not path.is_symlink():
                self._earlier.mkdir(parents=True, exist_ok=True)
                path.rename(free_name(self._earlier / path.name))
        variables = {
            "WANDB_SILENT": "true",  # the run directory must be the last line printed
            # Tables are kept there until they are uploaded; by default in the user's home.
            "WANDB_DATA_DIR": str((self._folder / "data").absolute()),
            # Seconds to wait for the process that writes, which starts slowly on busy cores.
            "WANDB__SERVICE_WAIT": "120",  # by default 30
        }
        for name in variables.keys() - os.environ.keys():
            os.environ[name] = _SET_VARIABLES[name] = variables[name]
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = dict(self._wandb_init)
        if os.environ.get(_SWEEP):  # the agent has chosen them
            for name in ("id", "project", "entity"):
                settings.pop(name, None)
        try:
            run = wandb.init(mode="offline" if self._offline else None, **settings)
        except wandb.Error as error:
            wandb.teardown()  # else the next run would use this one's settings
            _unset_variables()
            raise OutputError(
                f"Weights & Biases cannot begin a run: {error}",
                remedy="run the command again, which continues the run, or leave out logger=wandb",
            ) from error
        _BEGUN.add(run.id)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        if not run.starting_step:  # else the server has the rows
            for row in self._history.rows():
                run.log(row)
                self._step = row[STEP]
        return run

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs metrics as one row, without ``_epoch`` in names, as in the metrics file."""
        run = self.experiment  # which may change the step
        # Lightning adds a suffix to the names of an epoch's values.
        short = {name: name.removesuffix("_epoch") for name in metrics}
        row = {n if short[n] in metrics else short[n]: value for n, value in metrics.items()}
        # A test after training, especially in a later process, comes with a smaller step.
        self._step = row[STEP] = max(self._step, step or 0)
        row["_timestamp"] = time.time()
        run.log(row)
        self._history.append(row)


def end_tracking(*, failed: bool) -> None:
    """Ends the Weights & Biases run of this process's job, which may have ``failed``.

    The process that writes the run ends too. Otherwise jobs started from here would share that
    process, and the run of a killed job would stay open.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None or wandb.run.id not in _BEGUN:
        return  # no run is open, or one that other code has begun
    _BEGUN.discard(wandb.run.id)
    wandb.run.finish(exit_code=int(failed))
    wandb.teardown()
    _unset_variables()


def _unset_variables() -> None:
    """Removes the environment variables that :meth:`WandbRunLogger._begin` has set."""
    for name, value in _SET_VARIABLES.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _SET_VARIABLES.clear()


def _has_login() -> bool:
    """Looks for a login without ``wandb.login``, which would contact the server or wait."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    read = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, UnicodeDecodeError):
        read.read(folder / "settings", encoding="utf-8")
    settings = dict(read["default"]) if read.has_section("default") else {}
    if any(os.environ.get(name) for name in _KEYS) or settings.get("api_key"):
        return True
    default = f"https://{_PUBLIC_SERVER[0]}"
    url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or default
    host = urlsplit(url).netloc
    try:
        entries = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return False  # nor can Weights & Biases read it
    hosts = _PUBLIC_SERVER if host in _PUBLIC_SERVER else (host,)
    found = (entries.authenticators(each) for each in hosts)
    return any(entry is not None and entry[2] for entry in found)
