"""Procedurally modelled CAD objects: a data set that needs no download.

Classes come in families with a common overall form (vessels, seats, tables, cases, wheels) that
differ in parts such as handles, arms, drawers or teeth, so that silhouettes alone do not
distinguish them; ``benchmarks/shapes_baseline.py`` measures how far gross form goes.
"""

from sparsepipe.data.shapes.generate import SHAPE_CLASSES, generate_shapes, make_shape

__all__ = ["SHAPE_CLASSES", "generate_shapes", "make_shape"]
