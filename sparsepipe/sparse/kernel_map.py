"""Which input row each output row reads at each kernel offset.

Shape suffixes: N input sites, M output sites, K offsets of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse.coordinates import coords_of_keys, linear_keys
from sparsepipe.sparse.gather_plan import GatherPlan, build_gather_plan
from sparsepipe.sparse.kernel_spec import KernelSpec, Triple

if TYPE_CHECKING:
    from sparsepipe.sparse.cache import CoordinateCache

T = TypeVar("T")


class KernelMap:
    """The neighbours of every output site, and the output level they define.

    Attributes:
        spec: the window.
        neighbours_KM: int32, the input row at each offset, -1 where there is none.
        num_inputs: N, rows of the input level.
        output: cache of the output level; None for the input's own (a submanifold window), which
            has this map and is not held here, so that no cycle keeps both beyond their use.
        parent_N: for a tiling window the output row of each input, else None.
        offset_N: for a tiling window the offset at which it is read, else None.
    """

    __slots__ = (
        "_by_site",
        "_derived",
        "_num_pairs",
        "_plans",
        "_reversed",
        "neighbours_KM",
        "num_inputs",
        "offset_N",
        "output",
        "parent_N",
        "spec",
    )

    def __init__(
        self,
        spec: KernelSpec,
        neighbours_KM: Tensor,
        *,
        num_inputs: int,
        output: CoordinateCache | None,
        parent_N: Tensor | None = None,
        offset_N: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.neighbours_KM = neighbours_KM
        self.num_inputs = num_inputs
        self.output = output
        self.parent_N = parent_N
        self.offset_N = offset_N
        self._plans: dict[tuple[str, int], GatherPlan] = {}
        self._derived: dict[str, Any] = {}
        self._num_pairs: int | None = None
        self._by_site: Tensor | None = None
        self._reversed: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """M, rows of the output level."""
        return self.neighbours_KM.shape[1]

    @property
    def num_pairs(self) -> int:
        """Pairs of an input and an output over all offsets (read back once)."""
        if self._num_pairs is None:
            self._num_pairs = int((self.neighbours_KM >= 0).sum())
        return self._num_pairs

    def gather_plan(self, rows_per_block: int) -> GatherPlan:
        """The plan that makes outputs from inputs, in blocks of output rows."""
        return self._plan("forward", self.neighbours_KM, rows_per_block)

    def scatter_plan(self, rows_per_block: int) -> GatherPlan:
        """The plan that makes inputs from outputs, in blocks of input rows.

        It sums at each input what gathers at the outputs: the adjoint of
        :meth:`gather_plan`. For a symmetric window it is the same plan with the
        offsets in reverse order (:attr:`KernelSpec.is_symmetric`), and that one is
        returned, unreversed.
        """
        if self.spec.is_symmetric:
            return self.gather_plan(rows_per_block)
        return self._plan("backward", self.readers_KN, rows_per_block)

    @property
    def neighbours_MK(self) -> Tensor:
        """The neighbours by output site, N where there is none (to index padded rows)."""
        if self._by_site is None:
            rows_KM = torch.where(self.neighbours_KM < 0, self.num_inputs, self.neighbours_KM)
            self._by_site = rows_KM.t().contiguous()
        return self._by_site

    @property
    def readers_KN(self) -> Tensor:
        """int32, the output row that reads each input at each offset, -1 where none."""
        if self._reversed is None:
            self._reversed = invert_rows(self.neighbours_KM, self.num_inputs)
        return self._reversed

    def derived(self, name: str, build: Callable[[KernelMap], T]) -> T:
        """What ``build`` makes of this map, made at first use and kept under ``name``."""
        if name not in self._derived:
            self._derived[name] = build(self)
        value: T = self._derived[name]
        return value

    def _plan(self, direction: str, rows_KM: Tensor, rows_per_block: int) -> GatherPlan:
        key = direction, rows_per_block
        if key not in self._plans:
            self._plans[key] = build_gather_plan(rows_KM, rows_per_block)
        return self._plans[key]


def invert_rows(rows_KM: Tensor, num_targets: int) -> Tensor:
    """For each k swap the roles of rows: ``out[k, rows[k, m]] = m``, -1 elsewhere."""
    volume, count = rows_KM.shape
    # One column more takes what points nowhere, so no mask has to be read back.
    inverted = torch.full((volume, num_targets + 1), -1, dtype=torch.int32, device=rows_KM.device)
    places_KM = torch.where(rows_KM < 0, num_targets, rows_KM).long()
    own_M = torch.arange(count, dtype=torch.int32, device=rows_KM.device)
    inverted.scatter_(1, places_KM, own_M.expand(volume, count))
    return inverted[:, :num_targets].contiguous()


def build_kernel_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    """Build the map of one window over the sites of ``level`` (checked before).

    Output sites are the input sites for stride 1; ``floor(coords / stride)`` for
    windows that tile the grid; otherwise every site of the grid of
    ``ceil(extent / stride)`` whose window holds an input, as for a dense convolution
    with padding ``dilation * (K // 2)``.

    Raises:
        CoordinateError: see :func:`check_grid_is_known`.
    """
    check_grid_is_known(level, spec)
    if spec.is_submanifold:
        return _submanifold_map(level, spec)
    if spec.is_tiling:
        return _tiling_map(level, spec)
    return _strided_map(level, spec)


def check_grid_is_known(level: CoordinateCache, spec: KernelSpec) -> None:
    """Check that the output sites of a window do not hang on the other samples of a batch.

    A strided window that reads before its site can touch a site beyond the last input.
    Whether the grid has that site only ``spatial_shape`` can tell: the largest
    coordinate, which stands in elsewhere, may be another sample's.

    Raises:
        CoordinateError: such a window over sites whose ``spatial_shape`` was not given.
    """
    if level.spatial_shape is None and not spec.is_submanifold and any(spec.before):
        raise CoordinateError(
            f"a centred window of {spec.size} with stride {spec.stride} needs the grid's extent",
            remedy="pass spatial_shape to SparseTensor or sparse_collate",
        )


def _offsets(spec: KernelSpec, level: CoordinateCache) -> Tensor:
    return torch.tensor(spec.offsets(), dtype=torch.int32, device=level.coords_N4.device)


def _submanifold_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    offsets_K3 = _offsets(spec, level)
    coords_N4 = level.coords_N4
    count = coords_N4.shape[0]
    index = level.site_index(spec.reach)
    if not spec.is_symmetric:
        rows_KN = index.find(coords_N4, offsets_K3)
        return KernelMap(spec, rows_KN, num_inputs=count, output=None)
    # Who is my neighbour at an offset has me as neighbour at the opposite one.
    half = spec.volume // 2
    below_HN = index.find(coords_N4, offsets_K3[:half])
    own_N = torch.arange(count, dtype=torch.int32, device=coords_N4.device)
    above_HN = invert_rows(below_HN, count).flip(0)
    rows_KN = torch.cat([below_HN, own_N[None], above_HN])
    return KernelMap(spec, rows_KN, num_inputs=count, output=None)


def _coarse_shape(extent: Triple, stride: Triple) -> Triple:
    x, y, z = (-(-e // s) for e, s in zip(extent, stride, strict=True))
    return x, y, z


def _tiling_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    coords_N4 = level.coords_N4
    count, device = coords_N4.shape[0], coords_N4.device
    coarse = _coarse_shape(level.extent, spec.stride)
    divisor_4 = torch.tensor((1, *spec.stride), dtype=torch.int32, device=device)
    parents_N4 = torch.div(coords_N4, divisor_4, rounding_mode="floor")
    within_N4 = coords_N4 - parents_N4 * divisor_4
    keys_M, parent_N = torch.unique(linear_keys(parents_N4, coarse), return_inverse=True)
    size_x, size_y, _ = spec.size
    _, x, y, z = within_N4.long().unbind(1)
    offset_N = (z * size_y + y) * size_x + x
    total = keys_M.shape[0]
    rows_KM = torch.full((spec.volume, total), -1, dtype=torch.int32, device=device)
    own_N = torch.arange(count, dtype=torch.int32, device=device)
    rows_KM.view(-1)[offset_N * total + parent_N] = own_N
    output = level.coarser(coords_of_keys(keys_M, coarse), coarse)
    return KernelMap(
        spec, rows_KM, num_inputs=count, output=output, parent_N=parent_N, offset_N=offset_N
    )


def _strided_map(level: CoordinateCache, spec: KernelSpec) -> KernelMap:
    coords_N4 = level.coords_N4
    device = coords_N4.device
    coarse = _coarse_shape(level.extent, spec.stride)
    offsets_K3 = _offsets(spec, level)
    stride_3 = torch.tensor(spec.stride, dtype=torch.int32, device=device)
    coarse_3 = torch.tensor(coarse, dtype=torch.int32, device=device)
    # y * stride + offset = input, hence y = (input - offset) / stride where whole.
    shifted_KN3 = coords_N4[None, :, 1:] - offsets_K3[:, None, :]
    sites_KN3 = torch.div(shifted_KN3, stride_3, rounding_mode="floor")
    touched_KN = (
        (sites_KN3 * stride_3 == shifted_KN3) & (sites_KN3 >= 0) & (sites_KN3 < coarse_3)
    ).all(2)
    batch_KN = coords_N4[:, 0].expand(spec.volume, -1)
    candidates_P4 = torch.cat([batch_KN[..., None], sites_KN3], dim=2)[touched_KN]
    keys_M = torch.unique(linear_keys(candidates_P4, coarse))
    output = level.coarser(coords_of_keys(keys_M, coarse), coarse)
    base_M4 = output.coords_N4.clone()
    base_M4[:, 1:] *= stride_3
    rows_KM = level.site_index(spec.reach).find(base_M4, offsets_K3)
    return KernelMap(spec, rows_KM, num_inputs=coords_N4.shape[0], output=output)
