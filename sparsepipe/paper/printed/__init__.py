"""The figures that the papers print, digit by digit, in one place.

Zhai, He, Banerjee, Rangarajan, Ranka, "SparsePipe: Parallel Deep Learning for 3D Point Clouds":
``table1`` to ``table3`` are its Tables I to III, ``fig9`` the numbers of its text on Fig. 9;
``fig7`` is computed from the authors' own measurements of a TITAN Xp
(``sparsepipe/assets/profiles/paper``). ``pipeline_depth`` is Table I of Zhang and Sun (a CNN with
5x5 kernels, 42,000 images of 28x28), ``bigconv`` has the numbers of workers in Figs. 2 to 5 of
Tsaris and Hinkle, ``convnext_tp`` three step times of NVIDIA's and NIO's study.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

CITATION = (
    'Zhai, He, Banerjee, Rangarajan, Ranka, "SparsePipe: Parallel Deep Learning for 3D Point '
    'Clouds"'
)
CITATION_OF_DEPTH = 'Zhang, Sun, "A Parallel Pipeline Design for Training Deep Neural Networks"'
"""Citation of ``pipeline_depth``."""
CITATION_OF_BIGCONV = (
    'Tsaris, Hinkle, "Distributed Training for High Resolution Images: A Domain and Spatial '
    'Decomposition Approach"'
)
CITATION_OF_CONVNEXT = "the study of NVIDIA and NIO of tensor-parallel training of ConvNeXt-XL"

Name = Literal[
    "table1", "table2", "table3", "fig7", "fig9", "pipeline_depth", "bigconv", "convnext_tp"
]


@cache
def printed(name: Name) -> tuple[Mapping[str, str], ...]:
    """The rows of a table or figure, each with texts by column name, as printed digit by digit."""
    file = resources.files(__package__).joinpath(f"{name}.csv")
    return tuple(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))


def stages_of(assignment: str) -> list[str]:
    """The devices of each stage, ``4 RTX`` and ``1 TitanV`` for ``(4 RTX) (1 TitanV)``."""
    return re.findall(r"\((.*?)\)", assignment)
