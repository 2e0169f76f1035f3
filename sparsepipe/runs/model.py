"""The trained model of a run, which ``sparsepipe.load`` returns for predictions.

Shapes: B samples, P points of a scene, Q points of a file, N voxels, C channels, K classes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor, nn

from sparsepipe.config.finished_run import CLASSES, RECORD, Training, training_of
from sparsepipe.config.target import Target
from sparsepipe.data import SceneDataModule, ShapeDataModule, VolumeDataModule
from sparsepipe.data.files import FOUND
from sparsepipe.data.points import FloatArray, IntArray
from sparsepipe.data.preprocessing import Preprocessing
from sparsepipe.data.scenes import Scene, ScenePreprocessing
from sparsepipe.data.scenes.datamodule import collate_scenes
from sparsepipe.data.scenes.scene import IGNORED, mirrored
from sparsepipe.data.volumes.formats import check_replaceable, suffix_of, write_volume
from sparsepipe.data.volumes.geometry import Geometry
from sparsepipe.data.volumes.preparation import Preparation
from sparsepipe.errors import CheckpointError, ConfigError, DataError, SparsePipeError
from sparsepipe.models.windows import Windows
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
        # Converts the network in place, which computes below as Lightning did in the run's test.
        fabric.setup_module(network)
        self._precise = fabric.autocast
        parameter = next(network.parameters(), None)
        self._dtype = None if parameter is None else parameter.dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}(classes={list(self.classes)}, device='{self._device}')"

    @torch.inference_mode()
    def _logits(self, x: Any) -> Tensor:
        """Returns the logits of the classes, [B, K, ...], or [N, K] of sparse voxels."""
        with multiplying(self._matmul_precision), self._precise():  # the process is the user's
            found = self.module(x)
        logits: Tensor = found.feats if isinstance(found, SparseTensor) else found
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _probabilities(self, x: Any) -> NDArray[np.floating[Any]]:
        found: NDArray[np.floating[Any]] = self._logits(x).softmax(dim=1).cpu().numpy()
        check_finite(found)
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


class ReadVolume(NamedTuple):
    """A prepared volume: its input [C, *sizes], which may be padded with 0 at its ends as in the
    training, the geometries of prepared volume and file, and the folder of its temporary files.
    """

    input_C: FloatArray
    prepared: Geometry
    given: Geometry
    folder: Path


class VolumeModel(TrainedNetwork):
    """A trained network that labels the voxels of volumes.

    Attributes:
        preparation: makes the network's input from files, as in the training's test.
        patch: sizes of the windows that the network was trained on; None: on whole volumes.
        sizes: sizes to which its training padded whole volumes; None: with patches.
        in_channels: number of channels of the network's input; None: unknown.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        preparation: Preparation,
        *,
        patch: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        in_channels: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(network, classes, **settings)
        self.preparation, self.in_channels = preparation, in_channels
        self.patch, self.sizes = patch, sizes

    def predict(
        self,
        scan: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        save: str | os.PathLike[str] | None = None,
        overlap: float = 0.5,
        flips: bool = False,
        probabilities: bool = False,
    ) -> NDArray[Any]:
        """Predicts the class of every voxel of a scan, or the probabilities of all classes.

        After a training with patches, the network computes overlapping windows of their size, else
        the whole scan. Beside the scan as stored, only a window is in memory; the rest is in
        temporary files (``TMPDIR``), from which the returned array is mapped.

        Args:
            scan: path of the scan; if each channel has a file of its own, their paths in the order
                of ``data.source.channels``.
            save: where to write what is returned, in the scan's geometry and format, of which it
                must have the suffix. An existing file is replaced, unless it belongs to the scan.
            overlap: share of a window's size by which it overlaps the next one along an axis.
            flips: whether to take the mean of the logits over all mirror images as well.
            probabilities: whether to return the probabilities instead of the class numbers.

        Returns:
            Class numbers [*sizes], or probabilities float32 [K, *sizes], in the voxels of the scan
            and the order of axes that its format has: x, y, z, but z, y, x in TIFF files.

        Raises:
            DataError: the scan cannot be prepared, or ``save`` is one of its files, or other data.
            ConfigError: ``save`` has another suffix than the scan.
            CheckpointError: the network's output is not finite.
        """
        paths = [scan] if isinstance(scan, str | os.PathLike) else scan
        files = [Path(os.path.expanduser(path)) for path in paths]
        target = None if save is None else Path(os.path.expanduser(save))
        if target is not None:
            if suffix_of(target) != (suffix := suffix_of(files[0])):
                raise ConfigError(
                    f"{target} would have another format than {files[0]}",
                    remedy=f"give save= a name that ends with {suffix}",
                )
            check_replaceable(target, inputs=files)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            volume = self.read(files, Path(folder))
            logits_K = self.logits(volume, overlap=overlap, flips=flips)
            labels, probabilities_K = self.restored(logits_K, volume, probabilities=probabilities)
            values = labels if probabilities_K is None else probabilities_K
            if target is not None:
                axis = self.preparation.channel_axis
                write_volume(target, values, like=files[0], channel_axis=axis)
            return values

    def read(self, files: Sequence[Path], folder: Path) -> ReadVolume:
        """Prepares the files of a volume as in the training's test."""
        path = folder / "input.npy"

        def new(shape: tuple[int, ...]) -> FloatArray:
            channels, *sizes = shape
            padded = self.sizes or sizes
            if len(sizes) != len(self.patch or padded) or channels != (
                self.in_channels or channels
            ):
                raise DataError(
                    f"{files[0]} has {len(sizes)} axes and {channels} channels, unlike the scans "
                    "of the training",
                    remedy="give all files of a case, in the order of data.source.channels, or "
                    "leave it out",
                )
            whole = (channels, *map(max, sizes, padded))
            input_C: FloatArray = open_memmap(path, "w+", np.float32, whole)
            return input_C[:, *map(slice, sizes)]

        _, prepared, given = self.preparation.read(files, new=new)
        return ReadVolume(np.load(path, mmap_mode="r"), prepared, given, folder)

    @torch.inference_mode()
    def logits(self, volume: ReadVolume, *, overlap: float, flips: bool) -> FloatArray:
        """Returns the logits [K, *sizes] of a volume's input, mapped from a file."""
        sizes = volume.input_C.shape[1:]

        def read(part: tuple[slice, ...]) -> Tensor:
            x = torch.from_numpy(np.array(volume.input_C[None, :, *part]))
            return x.to(device=self._device, dtype=self._dtype)

        def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
            path, kind = volume.folder / f"sums_{len(shape)}.npy", like[:0].cpu().numpy().dtype
            return torch.from_numpy(open_memmap(path, "w+", kind, shape))

        windows = Windows(self.patch or sizes, overlap=overlap, flips=flips)
        found: FloatArray = windows.mean_logits(self._logits, read, sizes, zeros=zeros).numpy()
        return found

    def restored(
        self, logits_K: FloatArray, volume: ReadVolume, *, probabilities: bool
    ) -> tuple[NDArray[Any], FloatArray | None]:
        """Returns class numbers on the grid of a volume's file, and ``probabilities`` if wanted."""
        *_, prepared, given, folder = volume
        kind, shape, kept_K = np.min_scalar_type(len(self.classes) - 1), given.sizes, None
        labels = open_memmap(folder / "labels.npy", "w+", kind, shape)
        if probabilities:
            shape = (len(self.classes), *shape)
            kept_K = open_memmap(folder / "probabilities.npy", "w+", np.float32, shape)
        inside_K = logits_K[:, *map(slice, prepared.sizes)]
        slabs = self.preparation.restored(inside_K, prepared=prepared, given=given)
        for part, probabilities_K in slabs:
            check_finite(probabilities_K)
            labels[part] = probabilities_K.argmax(axis=0)
            if kept_K is not None:
                kept_K[part] = probabilities_K
        return labels, kept_K


def check_finite(probabilities: NDArray[Any]) -> None:
    """Raises a CheckpointError unless all probabilities are finite."""
    if not np.isfinite(probabilities).all():
        raise CheckpointError(
            "the network computes numbers that are not finite",
            remedy="check in metrics.csv whether its training diverged, and train with a lower "
            "learning rate or another trainer.precision",
        )


def load(run: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Any:
    """Loads the model of a training, which predicts as in the training's test.

    Returns a :class:`Model` if the training was on classes of shapes, a :class:`SceneModel` if it
    was on scenes whose points have labels, or a :class:`VolumeModel` if it was on files of volumes
    whose voxels have labels.

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
) -> Model | SceneModel | VolumeModel:
    """The model of a checkpoint whose training is known; raises errors as :func:`load` does."""
    content = read_checkpoint(path)
    record = content.get(RECORD) or {}
    recorded = record.get("data") or {}
    preprocess = preprocessing_of(training, recorded)
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
    settings = {name: trainer.get(name) for name in ("precision", "matmul_precision")}
    settings["device"] = device
    match preprocess:
        case Preparation():
            settings |= {name: recorded.get(name) for name in ("patch", "sizes")}
            settings["in_channels"] = training.values["model"].get("in_channels")
            return VolumeModel(network, classes, preprocess, **settings)
        case ScenePreprocessing():
            return SceneModel(network, classes, preprocess, **settings)
    return Model(network, classes, preprocess, **settings)


DataModule: TypeAlias = ShapeDataModule | SceneDataModule | VolumeDataModule
"""Data on which a network is trained that predicts a user's files."""


def data_of(training: Training) -> tuple[Target, type[DataModule]]:
    """The data module of a training, as its configuration describes it, and its class."""
    given = training.values.get("data")
    if not isinstance(given, Mapping) or not isinstance(given.get("_target_"), str):
        raise ConfigError(
            f"{training.origin} does not say what data it was trained on",
            remedy="give the directory of its run, or a checkpoint that a run has written",
        )
    data = Target.parse(given)
    kind = data.locate()
    known = isinstance(kind, type) and issubclass(kind, DataModule)
    if not known or (issubclass(kind, VolumeDataModule) and data.get("labels") != "voxel"):
        raise ConfigError(
            f"{training.origin} was trained on data of {data.path}, but only meshes, point clouds, "
            "scenes, and volumes whose voxels have labels can be predicted",
            remedy="measure this model on the test split of its data, with task=evaluate",
        )
    return data, kind


def preprocessing_of(
    training: Training, recorded: Mapping[str, Any]
) -> Preprocessing | ScenePreprocessing | Preparation:
    """The preprocessing of samples in a training's test; the data need not exist any more.

    Args:
        training: the training's configuration.
        recorded: settings of the data that its checkpoint records (their method ``recorded``).
    """
    data, kind = data_of(training)
    if issubclass(kind, VolumeDataModule):
        if not recorded.get("preparation"):
            raise ConfigError(
                f"{training.origin} does not record how volumes of files were prepared",
                remedy="train on files (data=volume_files) with this version of SparsePipe, or "
                "measure this model with task=evaluate",
            )
        return Preparation(**recorded["preparation"])
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
