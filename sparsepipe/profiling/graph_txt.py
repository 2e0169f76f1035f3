"""Reads ``graph.txt``, the costs by node from PipeDream's profiler, as profiles and states.

The file has a line for each node, then a line for each edge::

    node1 -- Conv2d(3, 64, ...) -- forward_compute_time=6.097, backward_compute_time=1.958,
                activation_size=52188160.0, parameter_size=6912.000
        node1 -- node2

The line of an edge begins with a tab. Times are in milliseconds, sizes in bytes; a node with
several outputs gives their sizes as ``[a; b]``. A fourth field ``stage_id=...``, which PipeDream's
optimizer adds, is ignored.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from sparsepipe.errors import ProfileError
from sparsepipe.profiling.profile import LayerProfile, Profile, State
from sparsepipe.utils import reading

_NODE = re.compile(
    r"(.+?) -- (.+) -- forward_compute_time=(.+), *backward_compute_time=(.+), *"
    r"activation_size=(.+), *parameter_size=(.+?)(?: -- .*)?"
)
MOST_STATES = 3_000
"""The most states of a graph, since a search considers all pairs of them."""
_REMEDY = "give an unchanged graph.txt of PipeDream's profiler, nodes before edges"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The nodes of a graph, which are layers, and the edges between them.

    Args:
        nodes: layers by node name, in the file's order.
        successors: for each node, the names of the nodes that read its output.
        input_meta: the entry ``input_bytes`` for a profile's ``meta``: bytes of the file's inputs,
            which are not among the nodes; empty if the file has none.
        given_bytes: for each node that reads inputs of the file, the bytes of these inputs.
    """

    nodes: Mapping[str, LayerProfile]
    successors: Mapping[str, Sequence[str]]
    input_meta: Mapping[str, float] = field(default_factory=dict)
    given_bytes: Mapping[str, float] = field(default_factory=dict)

    def predecessors(self) -> dict[str, list[str]]:
        """For each node, the names of the nodes whose outputs it reads."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name in self.nodes:
            for successor in self.successors[name]:
                found[successor].append(name)
        return found

    def chain(self) -> list[LayerProfile] | None:
        """The layers in the order of execution; None if the graph branches."""
        before = self.predecessors()
        heads = [name for name in self.nodes if not before[name]]
        if len(heads) != 1:
            return None
        order = [heads[0]]
        while following := self.successors[order[-1]]:
            if len(following) > 1 or len(before[following[0]]) > 1:
                return None
            order.append(following[0])
        return [self.nodes[name] for name in order] if len(order) == len(self.nodes) else None


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """Reads a ``graph.txt``; a ProfileError names the file if it is missing or malformed."""
    remedy = "correct the path of the graph.txt"
    with reading.explained(Path(path), "graph", error=ProfileError, remedy=remedy):
        return parse_graph(reading.read_text(path))


def parse_graph(text: str) -> Graph:
    """Parses the text of a ``graph.txt``, without the nodes that PipeDream's optimizer ignores.

    These are the inputs, whose cost is the same for all plans, and unused outputs picked from a
    tuple: sources called ``Input`` and sinks called ``__getitem__``, as in the function ``main`` of
    PipeDream's ``optimizer_graph_hierarchical.py``.
    """
    nodes: dict[str, LayerProfile] = {}
    successors: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if line.startswith("\t"):
                source, target = line.strip().split(" -- ")
                if target not in nodes:
                    raise KeyError(target)
                successors[source].append(target)
            elif line.strip():
                found = _NODE.fullmatch(line.strip())
                name, layer, *figures = found.groups() if found else ()
                forward_ms, backward_ms, activation, parameters = (
                    reading.amount(sum(map(float, figure.strip("[] ").split(";"))), "a figure")
                    for figure in figures
                )
                if name in nodes:
                    raise ValueError(f"{name} occurs twice")
                successors[name] = []
                nodes[name] = LayerProfile(
                    index=len(nodes),
                    name=layer,
                    kind=layer.partition("(")[0],
                    forward_s=forward_ms / 1000,
                    backward_s=backward_ms / 1000,
                    activation_bytes=activation,
                    parameter_bytes=parameters,
                )
        except (ValueError, KeyError) as error:
            raise ProfileError(
                f"line {number} is neither a node nor an edge between nodes above it ({error}): "
                f"{line.strip()}",
                remedy=_REMEDY,
            ) from error
    graph = _without_ends(Graph(nodes=nodes, successors=successors))
    if not graph.nodes:
        raise ProfileError("the graph has no layers", remedy=_REMEDY)
    try:
        TopologicalSorter(graph.predecessors()).prepare()
    except CycleError as error:
        raise ProfileError(
            f"the edges of the graph form a cycle: {' -- '.join(error.args[1])}", remedy=_REMEDY
        ) from error
    return graph


def chain_profile(graph: Graph, *, meta: Mapping[str, Any]) -> Profile:
    """The profile of a graph without branches; ``meta`` should name its origin as ``source``."""
    nodes = graph.chain()
    if nodes is None:
        raise ProfileError(
            "the graph branches: it is not a chain of layers",
            remedy="make its profile by states, with sparsepipe.profiling.graph_profile",
        )
    layers = tuple(replace(layer, index=index) for index, layer in enumerate(nodes))
    return Profile(layers=layers, meta={**graph.input_meta, **meta})


def _without_ends(graph: Graph) -> Graph:
    before = graph.predecessors()
    inputs = {
        name: node.activation_bytes
        for name, node in graph.nodes.items()
        if not before[name] and node.name.startswith("Input")
    }
    given: dict[str, float] = {}
    for name, size in inputs.items():
        for successor in graph.successors[name]:
            given[successor] = given.get(successor, 0.0) + size
    dropped = inputs.keys() | {
        name
        for name, node in graph.nodes.items()
        if not graph.successors[name] and node.name.startswith("__getitem__")
    }
    return Graph(
        nodes={name: node for name, node in graph.nodes.items() if name not in dropped},
        successors={
            name: [s for s in following if s not in dropped]
            for name, following in graph.successors.items()
            if name not in dropped
        },
        input_meta={"input_bytes": sum(inputs.values())} if inputs else {},
        given_bytes={name: size for name, size in given.items() if name not in dropped},
    )


def graph_profile(graph: Graph, *, meta: Mapping[str, Any]) -> Profile:
    """The profile of a graph: its layers if they form a chain, else its nodes and states."""
    if graph.chain() is not None:
        return chain_profile(graph, meta=meta)
    layers = tuple(
        replace(layer, index=index, name=f"{name} -- {layer.name}")
        for index, (name, layer) in enumerate(graph.nodes.items())
    )
    edges = {name: list(after) for name, after in graph.successors.items() if after}
    return Profile(
        layers=layers,
        meta={**graph.input_meta, **meta, "edges": edges},
        states=tuple(antichain_states(graph)),
    )


def antichain_states(graph: Graph) -> list[State]:
    """The states of a graph, each listed after those within it; the last one has all layers.

    A state is a set of layers that includes all predecessors of its layers: the work of a stage and
    of the stages before it. A stage is the step from one state to another that includes it, and its
    cost is the difference between the two. PipeDream names a state by its *antichain*, the layers
    in it that no other of its layers follows (Narayanan et al., PipeDream, SOSP 2019; its
    optimizer's ``Graph.antichain_dag``). A chain of L layers has L states.

    States with equally many layers are in no particular order. In ``cut_bytes``, a layer's output
    counts once, and only if a layer outside the state reads it; PipeDream also counts some outputs
    that no layer outside needs.
    """
    number = {name: place for place, name in enumerate(graph.nodes)}
    predecessors = graph.predecessors()
    before = [sum(1 << number[p] for p in {*predecessors[name]}) for name in graph.nodes]
    after = [sum(1 << number[s] for s in {*graph.successors[name]}) for name in graph.nodes]
    closed = [0] * len(number)  # each node with all its predecessors
    for name in TopologicalSorter(predecessors).static_order():
        node = number[name]
        closed[node] = 1 << node
        for previous in _ones(before[node]):
            closed[node] |= closed[previous]
    first = closed[next(n for n, known in enumerate(before) if not known)]
    found, queue = {first}, deque([first])
    while queue:
        layers, seen = queue.popleft(), 0
        for node in _ones(layers):
            for successor in _ones(after[node] & ~layers & ~seen):
                grown = layers | closed[successor]
                if grown not in found:
                    found.add(grown)
                    queue.append(grown)
            seen |= after[node]
        if len(found) > MOST_STATES:
            raise ProfileError(
                f"the graph has more than {MOST_STATES:,} states: too many branches are parallel",
                remedy="merge the layers of a block into one node, or profile the model as a "
                "chain of blocks",
            )
    names, nodes = list(graph.nodes), list(graph.nodes.values())
    states = []
    for layers in sorted({*found, (1 << len(nodes)) - 1}, key=int.bit_count):
        members = list(_ones(layers))
        states.append(
            State(
                layers=layers,
                antichain=tuple(names[n] for n in members if not after[n] & layers),
                compute_s=sum(nodes[n].compute_s for n in members),
                parameter_bytes=sum(nodes[n].parameter_bytes for n in members),
                input_bytes=sum(
                    graph.given_bytes.get(names[n], 0.0)
                    + sum(nodes[p].activation_bytes for p in _ones(before[n]))
                    for n in members
                ),
                cut_bytes=sum(nodes[n].activation_bytes for n in members if after[n] & ~layers),
            )
        )
    return states


def _ones(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
