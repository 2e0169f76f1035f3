"""The trained model of a run, which ``sparsepipe.load`` returns for predictions.

Shapes: B samples, P points of a scene, Q points of a file, N voxels, C channels, K classes.
"""

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
from sparsepipe.data import SceneDataModule, ShapeDataModule
from sparsepipe.data.files import FOUND
from sparsepipe.data.points import FloatArray, IntArray
from sparsepipe.data.preprocessing import Preprocessing
from sparsepipe.data.scenes import Scene, ScenePreprocessing
from sparsepipe.data.scenes.datamodule import collate_scenes
from sparsepipe.data.scenes.scene import IGNORED, mirrored
from sparsepipe.errors import CheckpointError, ConfigError, DataError, SparsePipeError
from sparsepipe.runs.checkpoints import find_checkpoint, load_weights, read_checkpoint
from sparsepipe.sparse import SparseTensor
from sparsepipe.utils.files import expanded
from sparsepipe.utils.process import MatmulPrecision, matmul_precision_on, multiplying

log = logging.getLogger(__name__)

BLOCK_VOXELS = 500_000
"""Largest number of voxels of a scene that are computed at once, unless another is set."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class PointPredictions:
    """The predicted classes of a scene's points, in their order.

    Attributes:
        labels_P: int64 [P], index of each point's class into the model's ``classes``; -100 for
            points without a finite position.
        probabilities_PK: float32 [P, K], the probabilities that the network gives to the classes;
            NaN for points without a finite position.
    """

    labels_P: IntArray
    probabilities_PK: FloatArray


class TrainedNetwork:
    """A trained network, which computes as in its run's test.

    Attributes:
        classes: names of the classes, in the order of the network's logits.
        module: the network, a plain ``nn.Module`` in evaluation mode that maps an input to logits.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
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
        self._dtype = None if parameter is None else parameter.dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}(classes={list(self.classes)}, device='{self._device}')"

    @torch.inference_mode()
    def _probabilities(self, x: Any) -> NDArray[np.floating[Any]]:
        """Returns the probabilities of the classes, [B, K], or [N, K] of voxels."""
        with multiplying(self._matmul_precision):  # the process is the user's
            logits = self._precise(x)
        rows = logits.feats if isinstance(logits, SparseTensor) else logits
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        found: NDArray[np.floating[Any]] = rows.softmax(dim=1).cpu().numpy()
        if not np.isfinite(found).all():
            raise CheckpointError(
                "the network computes numbers that are not finite",
                remedy="check in metrics.csv whether its training diverged, and train with a lower "
                "learning rate or another trainer.precision",
            )
        return found


class Model(TrainedNetwork):
    """A trained classifier of shapes.

    Attributes:
        preprocess: makes the network's input from a file, a mesh or points, in the network's
            floating-point type and on its device.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        preprocess: Preprocessing,
        **settings: Any,
    ) -> None:
        super().__init__(network, classes, **settings)
        self.preprocess = dataclasses.replace(preprocess, device=self._device, dtype=self._dtype)

    def predict(self, shape: Any) -> Prediction:
        """Predicts the class of one shape.

        Args:
            shape: the path of a file, a mesh of trimesh, or points [Q, 3] in any unit.

        Raises:
            DataError: the file does not exist or contains no shape.
            CheckpointError: the network's output is not finite.
        """
        return self.predict_samples([self.preprocess.sample(shape)])[0]

    def predict_samples(self, samples: Sequence[dict[str, Any]]) -> list[Prediction]:
        """Predicts the classes of samples made with ``preprocess.sample``, as one batch."""
        if not samples:
            return []
        found = []
        for probabilities_K in self._probabilities(self.preprocess.batch(samples)["input"]):
            order_K = np.argsort(-probabilities_K, kind="stable")
            ranked = {self.classes[k]: float(probabilities_K[k]) for k in order_K}
            name = next(iter(ranked))
            found.append(Prediction(name, ranked[name], ranked))
        return found


class SceneModel(TrainedNetwork):
    """A trained network that labels the points of scenes.

    Attributes:
        preprocess: reads scenes, and turns them into voxels, as in the training's test.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        preprocess: ScenePreprocessing,
        **settings: Any,
    ) -> None:
        super().__init__(network, classes, **settings)
        reader = preprocess.reader
        known = dataclasses.replace(reader, classes=reader.classes or self.classes)
        self.preprocess = dataclasses.replace(preprocess, reader=known)

    def predict(
        self,
        points: Any,
        features: Mapping[str, Any] | None = None,
        *,
        block_voxels: int = BLOCK_VOXELS,
        flips: bool = False,
    ) -> PointPredictions:
        """Predicts the class of every point of a scene.

        Args:
            points: positions [Q, 3] in metres, as an array or a tensor; or the path of a scene.
            features: the features that the network was trained with, by name: arrays [Q] or [Q, C];
                colours are shares in [0, 1], bytes or 16-bit numbers.
            block_voxels: largest number of voxels that are computed at once. Larger scenes are cut
                into overlapping blocks, and the probabilities of a point are the mean over its
                blocks.
            flips: whether to take the mean over the scene and its mirror images along both
                horizontal axes as well, which takes four times as long.

        Raises:
            DataError: the scene cannot be read, or lacks points or features.
            CheckpointError: the network's output is not finite.
        """
        reader = self.preprocess.reader
        if isinstance(points, str | os.PathLike):
            parsed = reader.parse(Path(os.path.expanduser(points)))
        else:
            given = {name: np.asarray(values) for name, values in (features or {}).items()}
            columns = {"coord": np.asarray(points), **given}
            try:
                parsed = reader.scene_of(columns, source="the scene")
            except ValueError as error:
                raise DataError(
                    f"the points are not a scene: {error}",
                    remedy="give points [Q, 3], and features [Q] or [Q, C] by name",
                ) from error
        found_PK = self.predict_scene(parsed.scene, block_voxels=block_voxels, flips=flips)
        return spread(found_PK, parsed.kept_Q)

    def predict_scene(
        self, scene: Scene, *, block_voxels: int = BLOCK_VOXELS, flips: bool = False
    ) -> FloatArray:
        """Returns the probabilities of the points of a scene, float32 [P, K]; see :meth:`predict`.

        The scene must have the features that the network was trained with.
        """
        voxels, up = self.preprocess.voxels, "xyz".index(self.preprocess.voxels.up_axis)
        scene, horizontal = voxels.prepare(scene), [axis for axis in range(3) if axis != up]
        mirrors = [(), horizontal[:1], horizontal[1:], horizontal] if flips else [()]
        sums_PK = np.zeros((len(scene), len(self.classes)), np.float32)
        for axes in mirrors:
            coords_N3, feats_NC, rows_P = voxels.voxelise(mirrored(scene, axes) if axes else scene)
            votes_NK = np.zeros((len(coords_N3), len(self.classes)), np.float32)
            for rows in blocks(coords_N3[:, horizontal], most=block_voxels):
                sites = coords_N3[rows] - coords_N3[rows].min(axis=0)
                nothing = np.zeros((len(rows), 0), np.float32)
                sample = {"coords": sites, "feats": feats_NC[rows], "counts": nothing, "index": 0}
                x = collate_scenes([sample])["input"].to(device=self._device, dtype=self._dtype)
                votes_NK[rows] += self._probabilities(x)
            votes_NK /= votes_NK.sum(axis=1, keepdims=True)
            sums_PK += votes_NK[rows_P]
        return sums_PK / np.float32(len(mirrors))


def blocks(places_N2: NDArray[Any], *, most: int) -> list[IntArray]:
    """Cuts voxels at horizontal positions [N, 2] into overlapping blocks of at most ``most`` each.

    A block that is too large becomes two along its longer side, each with 60 % of the voxels, again
    and again. Voxels above one another stay together, however many they are.

    Returns:
        The rows of the voxels of each block; every voxel is in at least one.
    """
    found, todo = list[IntArray](), [np.arange(len(places_N2))]
    while todo:
        rows = todo.pop()
        axis = int(np.ptp(places_N2[rows], axis=0).argmax())
        places_n, values = places_N2[rows, axis], np.unique(places_N2[rows, axis])
        if len(rows) <= most or len(values) == 1:
            found.append(rows)
            continue
        low, high = np.quantile(places_n, [0.4, 0.6], method="nearest")
        todo.append(rows[places_n >= max(low, values[1])])
        todo.append(rows[places_n <= min(high, values[-2])])
    return found


def spread(probabilities_PK: FloatArray, kept_Q: NDArray[np.bool_]) -> PointPredictions:
    """Returns predictions of all points, from those of the points that are ``kept_Q``."""
    all_QK = np.full((len(kept_Q), probabilities_PK.shape[1]), np.nan, np.float32)
    all_QK[kept_Q] = probabilities_PK
    labels_Q = np.full(len(kept_Q), IGNORED, np.int64)
    labels_Q[kept_Q] = probabilities_PK.argmax(axis=1)
    return PointPredictions(labels_Q, all_QK)


def load(run: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Any:
    """Loads the model of a training, which predicts as in the training's test.

    Returns a :class:`Model` if the training was on classes of shapes, or a :class:`SceneModel` if
    it was on scenes whose points have labels.

    Args:
        run: a checkpoint file, or a run's directory, whose ``best.ckpt`` is preferred to
            ``last.ckpt``.
        device: device of the model, such as ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        CheckpointError: the checkpoint does not exist, is broken, or its weights do not fit the
            model that it names.
        ConfigError: the configuration of the training is unknown, the training was on other data,
            or the device does not exist.
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


def trained_model(
    path: Path, training: Training, *, device: str | torch.device
) -> Model | SceneModel:
    """The model of a checkpoint whose training is known; raises errors as :func:`load` does."""
    content = read_checkpoint(path)
    record = content.get(RECORD) or {}
    preprocess = preprocessing_of(training, record.get("data") or {})
    classes = [str(name) for name in record.get(CLASSES) or ()]
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
    if isinstance(preprocess, ScenePreprocessing):
        return SceneModel(network, classes, preprocess, **precisions, device=device)
    return Model(network, classes, preprocess, **precisions, device=device)


def data_of(training: Training) -> tuple[Target, type[ShapeDataModule | SceneDataModule]]:
    """The data module of a training, as its configuration describes it, and its class."""
    given = training.values.get("data")
    if not isinstance(given, Mapping) or not isinstance(given.get("_target_"), str):
        raise ConfigError(
            f"{training.origin} does not say what data it was trained on",
            remedy="give the directory of its run, or a checkpoint that a run has written",
        )
    data = Target.parse(given)
    kind = data.locate()
    if not (isinstance(kind, type) and issubclass(kind, ShapeDataModule | SceneDataModule)):
        raise ConfigError(
            f"{training.origin} was trained on data of {data.path}, but only meshes, point clouds "
            "and scenes can be predicted",
            remedy="measure this model on the test split of its data, with task=evaluate",
        )
    return data, kind


def preprocessing_of(
    training: Training, recorded: Mapping[str, Any]
) -> Preprocessing | ScenePreprocessing:
    """The preprocessing of samples in a training's test; the data need not exist any more.

    Args:
        training: the training's configuration.
        recorded: settings of the data that its checkpoint records (``SceneDataModule.recorded``).
    """
    data, kind = data_of(training)
    # Only the class of the source is needed, which says how many points of a cloud it keeps.
    source = Target.parse(data.arguments["source"]).locate()
    module = kind(
        data.get("root"),
        source=lambda root, **given: source,
        **{
            name: Target.parse(value).build()
            if isinstance(value, Mapping) and "_target_" in value
            else value
            for name, value in {**data.arguments, **recorded}.items()
            if name not in _NOT_OF_A_SAMPLE and not name.startswith("_")
        },
        batch_size=1,
    )
    if isinstance(module, SceneDataModule):
        return module.preprocessing()
    return dataclasses.replace(module.preprocessing(), test_number=_TestNumbers(data))


_NOT_OF_A_SAMPLE = ("batch_size", "group", "root", "source", "split")
"""Settings of the data that do not affect the preprocessing of a single sample."""


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
