"""Weights of MinkowskiEngine, torchsparse and spconv in the names and layouts of this package.

Layers are paired in the order in which they compute, whatever their names. Layouts are those of
MinkowskiEngine 0.5.4, torchsparse 2.0 and 2.1, and spconv 2.3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsepipe import sparse
from sparsepipe.errors import ConfigError

Library = Literal["minkowski", "torchsparse", "spconv"]
Axes = Literal["xyz", "zyx"]
"""Order of the columns of a network's coordinates after the batch."""
_SPUNET = re.compile(
    r"(?:^|\.)(?P<part>conv_input|down|enc|up|dec|final)(?=\.|$)(?:\.(?P<level>\d+))?"
    r"(?:\.block(?P<block>\d+)\.(?P<shortcut>proj)?)?"
)
"""Parts of Pointcept's SpUNet, which registers all levels of a part before those of the next."""
_PARTS = {"conv_input": (0, 0), "down": (1, 0), "enc": (1, 1), "up": (2, 0), "dec": (2, 1)}


def library_of(weights: Mapping[str, Tensor]) -> Library | None:
    """Returns the library whose layouts tensors have, by name; None: no sparse convolutions."""
    if any(value.dim() == 5 and name.endswith("weight") for name, value in weights.items()):
        return "spconv"
    if not any(name.endswith("kernel") for name in weights):
        return None
    norms = [name.removesuffix("bn.running_mean") for name in weights]
    is_wrapped = any(  # a MinkowskiBatchNorm has nothing but its norm
        norm.endswith(".")
        and all(name.startswith(f"{norm}bn.") for name in weights if name.startswith(norm))
        for norm in norms
    )
    return "minkowski" if is_wrapped else "torchsparse"


def converted(
    weights: Mapping[str, Tensor],
    network: nn.Module,
    *,
    library: Library | None = None,
    axes: Axes | None = None,
) -> dict[str, Tensor]:
    """Returns a state dictionary of ``network`` with another library's ``weights``.

    Shapes are not compared, so that a last layer for other classes can be left out.

    Args:
        weights: tensors by name, as ``state_dict()`` of the other network returns them. Names of
            Pointcept's SpUNet are sorted; layers of others must be in the order in which they
            compute, and shortcuts after what they skip.
        network: the network of this package, such as :func:`.minkunet18` for MinkowskiEngine's.
        library: the library of ``weights``; None: :func:`library_of`.
        axes: which columns the network's coordinates had; None: z, y, x for spconv, as in its own
            examples, but x, y, z for Pointcept's SpUNet and for the other libraries.

    Raises:
        ConfigError: the two do not have the same normalisations and other layers with weights.
    """
    library = library or library_of(weights)
    theirs: dict[str, dict[str, Tensor]] = {}
    for name, value in weights.items():
        layer, _, leaf = name.rpartition(".")
        theirs.setdefault(layer.removesuffix(".bn"), {})[leaf] = value
    is_spunet = all(map(_SPUNET.search, theirs)) and any("conv_input" in name for name in theirs)
    axes = axes or ("zyx" if library == "spconv" and not is_spunet else "xyz")
    if is_spunet:
        theirs = {name: theirs[name] for name in sorted(theirs, key=_place)}
    kinds = sparse.Conv3d | nn.Linear | _NormBase
    ours = {name: each for name, each in network.named_modules() if isinstance(each, kinds)}
    their_norms = ["weight" in each and each["weight"].dim() == 1 for each in theirs.values()]
    our_norms = [isinstance(each, _NormBase) for each in ours.values()]
    if their_norms != our_norms:
        raise ConfigError(
            f"the weights are those of {len(theirs)} layers, {sum(their_norms)} of them norms, but "
            f"the network has {len(ours)}, {sum(our_norms)} of them norms, or the order differs",
            remedy="choose the model of the weights, and leave out what the network does not use",
        )
    found = {}
    for (their_name, tensors), (name, module) in zip(theirs.items(), ours.items(), strict=True):
        size = module.spec.size if isinstance(module, sparse.Conv3d) else (1, 1, 1)
        for leaf, value in tensors.items():
            if leaf != "kernel" and value.dim() != 5:  # MinkowskiEngine's biases are [1, C]
                found[f"{name}.{leaf}"] = value.flatten() if leaf == "bias" else value
                continue
            count = value.shape[1:4].numel() if value.dim() == 5 else value[..., 0, 0].numel()
            if count != math.prod(size):
                raise ConfigError(
                    f"{their_name} has {count} offsets, but {name} in its place {size}",
                    remedy="choose the model of the weights, with its settings",
                )
            own = own_kernel(value, library, size, axes=axes)
            is_linear = isinstance(module, nn.Linear)
            key, own = ("weight", own[0].t()) if is_linear else ("kernel", own)
            found[f"{name}.{key}"] = own
    return found


def _place(name: str) -> tuple[int, ...]:
    """Returns the place of a layer of Pointcept's SpUNet among all, as numbers to sort by."""
    found = _SPUNET.search(name)
    assert found is not None
    half, step = _PARTS.get(found["part"], (3, 0))
    level, block = (int(found[key] or 0) for key in ("level", "block"))
    return half, -level if half == 2 else level, step, block, found["shortcut"] is not None


def own_kernel(
    value: Tensor, library: Library | None, size: Sequence[int], *, axes: Axes = "xyz"
) -> Tensor:
    """Returns a kernel as ``Conv3d.kernel`` has it, [K, C_in, C_out], x fastest.

    Args:
        value: [K, C_in, C_out] or, for one offset, [C_in, C_out]; spconv's [C_out, ..., C_in] with
            the sizes along ``axes`` between.
        library: the library that made it.
        size: number of offsets along x, y and z.
        axes: see :func:`converted`; of spconv's alone.

    Raises:
        ConfigError: an even kernel of torchsparse with a size above 2, whose offsets differ
            between its versions.
    """
    if value.dim() == 5:
        if max(size) == 1:  # spconv multiplies by these numbers in the order of [C_in, C_out]
            return value.reshape(1, value.shape[4], value.shape[0])
        return value.permute(*((3, 2, 1) if axes == "xyz" else (1, 2, 3)), 4, 0).flatten(0, 2)
    x, y, z = size
    if library == "torchsparse" and x * y * z % 2 == 0:  # z fastest
        if max(size) > 2:
            raise ConfigError(
                f"kernels of size {tuple(size)} have different offsets in different versions of "
                "torchsparse",
                remedy="use only odd sizes, or only sizes of 1 and 2",
            )
        return value.view(x, y, z, *value.shape[1:]).transpose(0, 2).flatten(0, 2)
    return value if value.dim() == 3 else value[None]
