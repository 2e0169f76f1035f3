"""Preparation of volumes of unlike scanners: orientation, spacing, intensity and channels.

Shapes: D spatial dimensions, 1 to 3; C channels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.ndimage import gaussian_filter1d
from scipy.special import softmax

from sparsepipe.data.points import ExactArray, FloatArray, IntArray
from sparsepipe.data.volumes.formats import ChannelAxis, read_volume
from sparsepipe.data.volumes.geometry import WORLD_AXIS, Geometry
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.arguments import checked

_Range = Annotated[Sequence[float], Field(min_length=2, max_length=2)]
Intensity = (
    Literal["zscore"]
    | Annotated[
        Mapping[Literal["percentiles", "window"], _Range], Field(min_length=1, max_length=1)
    ]
    | None
)
_FWHM_PER_SIGMA = 2 * math.sqrt(2 * math.log(2))
"""Full width at half maximum of a Gaussian, relative to its standard deviation."""
_SLAB_BYTES = 2**24
"""Size of a slab of a volume or of probabilities; several times that is in memory."""
_MOST_RANKED = 2**24
"""Largest number of values of a volume of which percentiles are taken."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Steps that turn volumes into a network's input, in this order; its output is turned back.

    Attributes:
        orientation: directions to which the axes of prepared arrays point, such as RAS (right,
            anterior, superior); axes are only permuted and flipped, so an oblique scan stays so.
        spacing: mm between voxels along the axes of prepared arrays. Inputs are interpolated
            linearly, labels are those of the nearest voxels; the middle of a volume stays in place.
        intensity: of each channel of a volume, ``zscore`` subtracts the mean and divides by the
            standard deviation; ``percentiles`` and ``window``, each with its lower and upper limit,
            clip and scale to [0, 1].
        channels: endings of the names (without suffixes) of a case's files, such as _T1 and _T2,
            in the order of channels; empty: a case has one file.
        channel_axis: which axis of each file holds channels.
        mean: number subtracted at last.
        std: number by which values are then divided.
        fill: number that at first replaces values that are not finite.
    """

    orientation: Annotated[str, Field(pattern="^[RLAPSI]+$")] | None = None
    spacing: Sequence[Annotated[float, Field(gt=0)]] | None = None
    intensity: Intensity = None
    channels: Sequence[str] = ()
    channel_axis: ChannelAxis | None = None
    mean: float = 0.0
    std: float = 1.0
    fill: float | None = None

    def __post_init__(self) -> None:
        limits = self.intensity.values() if isinstance(self.intensity, Mapping) else ()
        if any(low >= high for low, high in limits):
            raise ConfigError(
                f"data.source.intensity={self.intensity} has no values between its limits",
                remedy="write the lower limit first, then the upper one",
            )

    @property
    def is_needed(self) -> bool:
        """Whether any step but ``fill``, ``mean`` and ``std`` is set."""
        return any((self.orientation, self.spacing, self.intensity, self.channels))

    def oriented(self, given: Geometry) -> Geometry:
        """Returns the geometry of a volume whose axes are swapped and flipped.

        Raises:
            DataError: its file does not say where its voxels are.
        """
        order, flips = self._turn(given)
        turned_44 = np.eye(4)  # from indices in the turned array to those in the given one
        turned_44[:, : len(order)] = 0
        for axis, (old, flip) in enumerate(zip(order, flips, strict=True)):
            turned_44[old, axis] = flip.step
            turned_44[old, 3] = given.sizes[old] - 1 if flip.step < 0 else 0
        sizes = tuple(given.sizes[axis] for axis in order)
        return replace(given, sizes=sizes, affine_44=given.affine_44 @ turned_44)

    def geometry(self, given: Geometry) -> Geometry:
        """Returns the geometry that the prepared array of a volume has.

        Raises:
            DataError: its file does not say where its voxels are, or how large, or has not as many
                axes as ``orientation`` and ``spacing``.
        """
        turned = self.oriented(given)
        if self.spacing is None:
            return turned
        if given.known == "nothing" or len(self.spacing) != len(turned.sizes):
            raise DataError(
                f"{given.file} has {len(turned.sizes)} axes, and does "
                f"{'not ' * (given.known == 'nothing')}say how large its voxels are, but "
                f"data.source.spacing={list(self.spacing)}",
                remedy="write the file with its spacing, and data.source.spacing with a number for "
                "each axis, or set data.source.spacing=null",
            )
        scaled_44, sizes = np.eye(4), list[int]()
        for axis, (new, old) in enumerate(zip(self.spacing, turned.spacing, strict=True)):
            sizes.append(max(1, round(turned.sizes[axis] * old / new)))
            scaled_44[axis, axis] = new / old
            scaled_44[axis, 3] = (turned.sizes[axis] - 1 - (sizes[-1] - 1) * new / old) / 2
        return replace(turned, sizes=tuple(sizes), affine_44=turned.affine_44 @ scaled_44)

    def read(
        self, files: Sequence[Path], *, new: Callable[[tuple[int, ...]], FloatArray] = np.empty
    ) -> tuple[FloatArray, Geometry, Geometry]:
        """Reads and prepares a case: its input [C, *sizes], that array's geometry, and the file's.

        Where the spacing becomes coarser, a Gaussian filter first removes what the new grid cannot
        show: Cardoso et al., "Scale factor point spread function matching", MICCAI 2015. Beside the
        input and what ``read_volume`` holds, only slabs of bounded size are in memory.

        Args:
            files: one file, or one for each of ``channels``, all on one grid.
            new: makes the float32 array for the input, given its shape, such as a mapped file.

        Raises:
            DataError: a file cannot be read, lacks geometry that the preparation needs, is not on
                the grid of the first, or has values that are not finite while ``fill`` is None.
        """
        given, channels = Geometry((), np.eye(4), "nothing"), list[tuple[Path, NDArray[Any]]]()
        for path in files:
            stored, geometry = read_volume(path, channel_axis=self.channel_axis)
            given = given if channels else geometry
            given.check_same_grid(geometry)
            channels += [(path, each) for each in (stored if self.channel_axis else stored[None])]
        turned, prepared = self.oriented(given), self.geometry(given)
        (order, flips), places = self._turn(given), _places(turned, prepared)
        sigmas = [  # in voxels
            math.sqrt(max(new**2 - old**2, 0)) / _FWHM_PER_SIGMA / old
            for old, new in zip(turned.spacing, prepared.spacing, strict=True)
        ]
        input_C = new((len(channels), *prepared.sizes))
        for (path, channel), values in zip(channels, input_C, strict=True):
            source = channel.transpose(order)[flips]
            for rows in _slabs(values, of=source):
                first, last = places[0][rows][[0, -1]]
                margin = int(4 * sigmas[0] + 0.5)  # reach of the filter
                read = slice(max(0, math.floor(first) - margin), math.ceil(last) + margin + 1)
                slab = finite(source[read], fill=self.fill, file=str(path))
                for axis, (sigma, wanted) in enumerate(zip(sigmas, places, strict=True)):
                    if sigma > 1e-3:
                        slab = gaussian_filter1d(slab, sigma, axis, mode="nearest")
                    moved = wanted[rows] - read.start if axis == 0 else wanted
                    slab = _interpolated(slab, axis, moved)
                values[rows] = slab
            self._normalise(values)
        return input_C, prepared, given

    def read_labels(self, path: Path, given: Geometry) -> NDArray[Any]:
        """Reads labels of voxels on the prepared grid of their input, with values as stored.

        Raises:
            DataError: the file cannot be read, or its voxels are not those of the input, which has
                the geometry ``given``.
        """
        stored, geometry = read_volume(path)
        given.check_same_grid(geometry)
        order, flips = self._turn(given)
        places = _places(self.oriented(given), self.geometry(given))
        nearest = [np.floor(each + 0.5).astype(np.int64) for each in places]
        return np.ascontiguousarray(stored.transpose(order)[flips][np.ix_(*nearest)])

    def restored(
        self, logits_K: NDArray[Any], *, prepared: Geometry, given: Geometry
    ) -> Iterator[tuple[tuple[Any, ...], FloatArray]]:
        """Yields the probabilities of classes on a file's own grid, in slabs of bounded memory.

        Probabilities, not logits, are interpolated linearly, so that they still add up to 1. Slabs
        are rows of the prepared array's first axis, so that a mapped file is read in its order.

        Args:
            logits_K: output of a network for a prepared input, [K, *sizes of ``prepared``]; may be
                memory-mapped.
            prepared: geometry of the prepared input.
            given: geometry of the file.

        Yields:
            An index of a slab in arrays [*sizes] or [K, *sizes] of ``given``, and the slab's
            probabilities, float32 [K, *sizes of the slab].
        """
        order, flips = self._turn(given)
        found = _places(prepared, self.oriented(given))
        places = [each[flip] for each, flip in zip(found, flips, strict=True)]
        back, count = 1 + np.argsort(order), len(places[0])
        voxels = max(math.prod(prepared.sizes), math.prod(given.sizes))
        rows = max(1, _SLAB_BYTES * count // (4 * len(logits_K) * voxels))
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            first, last = sorted(places[0][[part.start, part.stop - 1]])
            read = slice(math.floor(first), math.ceil(last) + 1)
            values_K: FloatArray = softmax(np.asarray(logits_K[:, read], np.float32), axis=0)
            for axis, wanted in enumerate(places):
                moved = wanted if axis else wanted[part] - read.start
                values_K = _interpolated(values_K, axis + 1, moved)
            after = (slice(None),) * (len(order) - 1 - order[0])
            yield (..., part, *after), values_K.transpose(0, *back)

    def _turn(self, given: Geometry) -> tuple[tuple[int, ...], tuple[slice, ...]]:
        """Returns the given axes in the order of the prepared ones, and slices that flip these."""
        letters = given.axes if self.orientation is None else self.orientation
        wanted, axes = ([WORLD_AXIS[letter] for letter in x] for x in (letters, given.axes))
        if (self.orientation and given.known != "place") or sorted(wanted) != sorted(axes):
            raise DataError(
                f"the axes of {given.file} point to "
                f"{given.axes if given.known == 'place' else 'unknown directions'}, and cannot be "
                f"brought to {self.orientation}, as in the training",
                remedy="write the file with its affine, as NIfTI, NRRD or MetaImage; or train with "
                "another data.source.orientation: null, or one of R and L, A and P, S and I each",
            )
        order = tuple(axes.index(axis) for axis in wanted)
        kept = [given.axes[axis] == x for axis, x in zip(order, letters, strict=True)]
        return order, tuple(slice(None, None, 1 if each else -1) for each in kept)

    def _normalise(self, values: FloatArray) -> None:
        """Applies ``intensity``, ``mean`` and ``std`` to a channel; equal values become 0."""
        low, span, slabs = 0.0, 1.0, _slabs(values)
        limits: Sequence[float] | FloatArray = (-np.inf, np.inf)
        if self.intensity == "zscore":
            low = sum(values[rows].sum(dtype=np.float64) for rows in slabs) / values.size
            squares = (((values[rows] - low) ** 2).sum(dtype=np.float64) for rows in slabs)
            span = math.sqrt(sum(squares) / values.size)
        elif isinstance(self.intensity, Mapping):
            ((kind, limits),) = self.intensity.items()
            if kind == "percentiles":  # of evenly spread values, since they are copied
                limits = np.percentile(values.flat[:: -(-values.size // _MOST_RANKED)], limits)
            low, span = limits[0], limits[1] - limits[0]
        for rows in slabs:
            slab = (values[rows].clip(*limits) - np.float32(low)) / np.float32(span or 1)
            values[rows] = (slab - np.float32(self.mean)) / np.float32(self.std)


def _slabs(values: NDArray[Any], *, of: NDArray[Any] | None = None) -> list[slice]:
    """Cuts the first axis so that slabs, also those ``of`` another array, have bounded sizes."""
    largest = max(values.size, 0 if of is None else of.size)
    rows = max(1, _SLAB_BYTES * len(values) // (4 * largest))
    return [slice(first, first + rows) for first in range(0, len(values), rows)]


def finite(stored: NDArray[Any], *, fill: float | None, file: str) -> FloatArray:
    """Returns values as float32, with ``fill`` for those that are not finite.

    Raises:
        DataError: ``file`` has such values, and ``fill`` is None.
    """
    with np.errstate(over="ignore"):
        values: FloatArray = np.array(stored, np.float32, order="C")
    if stored.dtype.kind == "f" and not (is_finite := np.isfinite(values)).all():
        if fill is None:
            raise DataError(
                f"{file} has {np.sum(~is_finite):,} values that are not finite: NaN, infinite or "
                "beyond float32",
                remedy="correct the file, or set data.source.fill to the number to take instead",
            )
        values[~is_finite] = fill
    return values


def _places(grid: Geometry, other: Geometry) -> list[ExactArray]:
    """Returns, for each axis, where the voxels of ``other`` are, as indices in ``grid``.

    The grids have the same directions and the same middle; voxels beyond the edge are put on it.
    """
    return [
        # Rounded, because an affine gives the spacing only nearly.
        ((np.arange(new) - (new - 1) / 2) * (apart / side) + (old - 1) / 2)
        .round(9)
        .clip(0, old - 1)
        for old, new, side, apart in zip(
            grid.sizes, other.sizes, grid.spacing, other.spacing, strict=True
        )
    ]


def _interpolated(values: FloatArray, axis: int, places: ExactArray) -> FloatArray:
    """Interpolates linearly along an axis, at indices that need not be whole."""
    if np.array_equal(places, np.arange(values.shape[axis])):
        return values
    low: IntArray = np.floor(places).astype(np.int64)
    weights = (places - low).astype(np.float32).reshape(-1, *(1,) * (values.ndim - 1 - axis))
    found = values.take(low, axis)
    found += weights * (values.take(np.minimum(low + 1, values.shape[axis] - 1), axis) - found)
    return found
