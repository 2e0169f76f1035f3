"""The cases of the tests of spatial parallelism, by our shards and by torch's DTensor."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_ranks import RankFailed, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.spatial import Grid

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.spatial_cases import CHANNELS, Case, cases, error

BOUND = 1e-12
TIMEOUT_S = 20.0
RIGHT, WRONG, REFUSED = "equal one process", "differ in silence", "refused"
CRASHED = "crash or hang"
RANKS = 2


def compare(dimensions: int, *, quick: bool) -> Mapping[str, Mapping[str, int]]:
    """How many cases end how, by our shards and by DTensor.

    Args:
        dimensions: spatial ones.
        quick: a tenth of the cases.
    """
    found = {}
    numbers = list(range(0, len(cases(dimensions)), 10 if quick else 1))
    for name in ("ours", "dtensor"):
        outcomes = _outcomes(name, dimensions, numbers)
        counts = Counter(outcomes.values())
        found[name] = {what: counts[what] for what in (RIGHT, WRONG, REFUSED, CRASHED)}
    return found


def _outcomes(name: str, dimensions: int, numbers: Sequence[int]) -> dict[int, str]:
    """By case. Ranks that crash or hang begin again behind that case."""
    found: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        while left := [number for number in numbers if number not in found]:
            try:
                on_ranks(_evaluate, RANKS, name, dimensions, left, directory)
            except RankFailed:
                found |= _merged(directory)
                if left[0] not in found:
                    found[left[0]] = CRASHED
            else:
                found |= _merged(directory)
    return found


def _merged(directory: str) -> dict[int, str]:
    """Of the cases that all ranks have finished, the worst outcome of any."""
    order = [RIGHT, REFUSED, WRONG]
    ranks: list[dict[int, str]] = []
    for path in sorted(Path(directory).glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        ranks.append(dict(lines))
    common = set.intersection(*(set(rank) for rank in ranks)) if len(ranks) == RANKS else set()
    return {number: max((rank[number] for rank in ranks), key=order.index) for number in common}


def _evaluate(
    rank: int, name: str, dimensions: int, numbers: Sequence[int], directory: str
) -> None:
    """Appends the outcome of each case to a file of this rank."""
    warnings.filterwarnings("ignore", category=UserWarning)  # that torch gives for some cases
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    chosen, grid = cases(dimensions), Grid((*[1] * (dimensions - 1), RANKS))
    with Path(directory, f"{rank}.jsonl").open("a", encoding="utf-8") as file:
        for number in numbers:
            case = chosen[number]
            try:
                largest = error(case, grid) if name == "ours" else _dtensor_error(case)
                outcome = RIGHT if largest <= BOUND else WRONG
            except ConfigError:
                outcome = REFUSED
            except AssertionError:
                outcome = WRONG  # another shape, or no gradient
            except Exception:
                if name == "ours":
                    raise
                outcome = REFUSED
            file.write(json.dumps([number, outcome]) + "\n")
            file.flush()
            if outcome == REFUSED:
                dist.barrier()  # fails, and ends this crew, where only one rank has refused
    process_group.leave()


def _dtensor_error(case: Case) -> float:
    """The largest relative error of outputs and gradients."""
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    module = case.make().double()
    alone = copy.deepcopy(module)
    whole = torch.randn(2, CHANNELS, *case.size, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    expected = alone(whole)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    distribute_module(module, mesh)
    shard = distribute_tensor(whole.detach(), mesh, [Shard(whole.dim() - 1)]).requires_grad_()
    torch.manual_seed(1)
    output = module(shard)
    if (forward := _relative(output, expected)) > BOUND:
        return forward  # its backward pass may refuse, and the output has been given
    whole_output = output.full_tensor() if isinstance(output, DTensor) else output
    (whole_output * weights).sum().backward()
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        (shard.grad, whole.grad),
        *((mine.grad, theirs.grad) for mine, theirs in _pairs(module, alone)),
        *zip(module.buffers(), alone.buffers(), strict=True),
    ]
    return max(_relative(mine, theirs) for mine, theirs in pairs)


def _pairs(module: nn.Module, alone: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(module.parameters(), alone.parameters(), strict=True))


def _relative(mine: Tensor | None, theirs: Tensor | None) -> float:
    assert mine is not None
    assert theirs is not None
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    assert whole.shape == theirs.shape
    if not whole.numel():
        return 0.0
    largest = max(float(theirs.detach().double().abs().max()), 1e-6)
    return float((whole.detach().double() - theirs.detach().double()).abs().max()) / largest
