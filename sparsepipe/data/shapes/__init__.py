"""Procedurally modelled CAD objects: the data set that needs no download.

Classes come in families that share a gross form (vessels, seats, tables, cases, wheels) and
differ in parts: a handle or two, arms, drawers, teeth. So silhouettes alone do not tell them
apart; ``benchmarks/shapes_baseline.py`` measures how far they go.
"""

from sparsepipe.data.shapes.generate import (
    SHAPE_CLASSES,
    ShapesSettings,
    generate_shapes,
    make_shape,
)

__all__ = ["SHAPE_CLASSES", "ShapesSettings", "generate_shapes", "make_shape"]
