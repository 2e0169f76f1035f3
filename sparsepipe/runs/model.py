"""The trained model of a run, which ``sparsepipe.load`` returns for predictions."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import nn

from sparsepipe.config.finished_run import CLASSES, RECORD, Training, training_of
from sparsepipe.config.target import Target
from sparsepipe.data import ShapeDataModule
from sparsepipe.data.files import FOUND
from sparsepipe.data.preprocessing import Preprocessing
from sparsepipe.errors import CheckpointError, ConfigError, SparsePipeError
from sparsepipe.runs.checkpoints import find_checkpoint, load_weights, read_checkpoint
from sparsepipe.utils.files import expanded
from sparsepipe.utils.process import MatmulPrecision, matmul_precision_on, multiplying

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted class of a shape.

    Attributes:
        name: name of the class.
        probability: the probability that the network gives this class, in [0, 1].
        probabilities: the probabilities of all classes by name, the most probable first.
    """

    name: str
    probability: float
    probabilities: Mapping[str, float]


class Model:
    """A trained classifier of shapes.

    Attributes:
        classes: names of the classes, in the order of the network's logits.
        module: the network, a plain ``nn.Module`` in evaluation mode that maps what ``preprocess``
            returns to logits [1, K].
        preprocess: makes the network's input from a file, a mesh or points, in the network's
            floating-point type and on its device.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        preprocess: Preprocessing,
        *,
        precision: Any = None,
        matmul_precision: MatmulPrecision | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.classes = tuple(classes)
        self.module = network.eval()
        self._device = torch.device(device)
        self._matmul_precision = matmul_precision_on(self._device.type, matmul_precision)
        on_gpu = self._device.type == "cuda"
        fabric = Fabric(
            accelerator="gpu" if on_gpu else "cpu",
            devices=[self._device.index or 0] if on_gpu else 1,
            precision=precision,
        )
        # Fabric converts the network in place, and calls it as Lightning did in the run's test.
        self._precise = fabric.setup_module(network)
        parameter = next(network.parameters(), None)
        dtype = None if parameter is None else parameter.dtype
        self.preprocess = dataclasses.replace(preprocess, device=self._device, dtype=dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(classes={list(self.classes)}, device='{self._device}')"

    def predict(self, shape: Any) -> Prediction:
        """Predicts the class of one shape.

        Args:
            shape: the path of a file, a mesh of trimesh, or points [Q, 3] in any unit.

        Raises:
            DataError: the file does not exist or contains no shape.
            CheckpointError: the network's output is not finite.
        """
        return self.predict_samples([self.preprocess.sample(shape)])[0]

    @torch.inference_mode()
    def predict_samples(self, samples: Sequence[dict[str, Any]]) -> list[Prediction]:
        """Predicts the classes of samples made with ``preprocess.sample``, as one batch."""
        if not samples:
            return []
        with multiplying(self._matmul_precision):  # the process is the user's
            logits_BK = self._precise(self.preprocess.batch(samples)["input"])
        logits_BK = logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))
        probabilities_BK: NDArray[np.floating[Any]] = logits_BK.softmax(dim=1).cpu().numpy()
        if not np.isfinite(probabilities_BK).all():
            raise CheckpointError(
                "the network computes numbers that are not finite",
                remedy="check in metrics.csv whether its training diverged, and train with a lower "
                "learning rate or another trainer.precision",
            )
        found = []
        for probabilities_K in probabilities_BK:
            order_K = np.argsort(-probabilities_K, kind="stable")
            ranked = {self.classes[k]: float(probabilities_K[k]) for k in order_K}
            name = next(iter(ranked))
            found.append(Prediction(name, ranked[name], ranked))
        return found


def load(run: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Model:
    """Loads the model of a training, which predicts classes of shapes as in the training's test.

    Args:
        run: a checkpoint file, or a run's directory, whose ``best.ckpt`` is preferred to
            ``last.ckpt``.
        device: device of the model, such as ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        CheckpointError: the checkpoint does not exist, is broken, or its weights do not fit the
            model that it names.
        ConfigError: the configuration of the training is unknown, the training was not on classes
            of shapes, or the device does not exist.
    """
    there, found = {"cpu": 1, "cuda": torch.cuda.device_count()}, None
    with suppress(RuntimeError, TypeError):
        found = torch.device(device)
    if found is None or (found.index or 0) >= there.get(found.type, 0):
        raise ConfigError(
            f"device {str(device)!r} not found", remedy="give cpu, or cuda if torch finds a GPU"
        )
    path = find_checkpoint(os.fspath(run), best=True)
    training = training_of(os.fspath(run))
    if training is None:
        raise ConfigError(
            f"the configuration with which {path} was trained is unknown",
            remedy="give the directory of its run, or a checkpoint that a run has written",
        )
    return trained_model(path, training, device=device)


def trained_model(path: Path, training: Training, *, device: str | torch.device) -> Model:
    """The model of a checkpoint whose training is known; raises errors as :func:`load` does."""
    preprocess = preprocessing_of(training)
    content = read_checkpoint(path)
    classes = [str(name) for name in (content.get(RECORD) or {}).get(CLASSES) or ()]
    if not classes:
        raise ConfigError(
            f"the classes on which {path} was trained are unknown",
            remedy="evaluate it with task=evaluate, which reads the classes from the data",
        )
    network = Target.parse(training.values["model"]).build_with(
        num_classes=len(classes), class_names=classes
    )
    load_weights(network, content["state_dict"], path)
    trainer = training.values.get("trainer") or {}
    precisions = {name: trainer.get(name) for name in ("precision", "matmul_precision")}
    return Model(network, classes, preprocess, **precisions, device=device)


def preprocessing_of(training: Training) -> Preprocessing:
    """The preprocessing of shapes in a training's test; the data need not exist any more."""
    given = training.values.get("data")
    if not isinstance(given, Mapping) or not isinstance(given.get("_target_"), str):
        raise ConfigError(
            f"{training.origin} does not say what data it was trained on",
            remedy="give the directory of its run, or a checkpoint that a run has written",
        )
    data = Target.parse(given)
    kind = data.locate()
    if not (isinstance(kind, type) and issubclass(kind, ShapeDataModule)):
        raise ConfigError(
            f"{training.origin} was trained on data of {data.path}, but only meshes and point "
            "clouds can be classified",
            remedy="measure this model on the test split of its data, with task=evaluate",
        )
    # Only the class of the source is needed, which says how many points of a cloud it keeps.
    source = Target.parse(data.arguments["source"]).locate()
    module = kind(
        data.get("root"),
        source=lambda root: source,
        **{
            name: Target.parse(value).build() if isinstance(value, Mapping) else value
            for name, value in data.arguments.items()
            if name not in _NOT_OF_A_SHAPE and not name.startswith("_")
        },
        batch_size=1,
    )
    return dataclasses.replace(module.preprocessing(), test_number=_TestNumbers(data))


_NOT_OF_A_SHAPE = ("batch_size", "root", "source", "split")
"""Settings of the data that do not affect the preprocessing of a single shape."""


class _TestNumbers:
    """Looks up a file's index in a test split, which seeds the choice of points; else None."""

    def __init__(self, data: Target) -> None:
        self._data = data
        self._root = os.path.abspath(expanded(str(data.get("root"))))

    def __call__(self, path: Path) -> int | None:
        place = os.path.abspath(path)
        return self._numbers.get(place) if place.startswith(self._root + os.sep) else None

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        was_disabled, FOUND.disabled = FOUND.disabled, True  # these data are only looked up
        try:
            files = self._data.build().samples("test").files
        except SparsePipeError as error:
            log.info("the test of the training cannot be read: %s", error.message)
            return {}
        finally:
            FOUND.disabled = was_disabled
        return {os.path.abspath(file): number for number, file in enumerate(files)}
