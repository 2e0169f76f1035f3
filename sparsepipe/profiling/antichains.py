"""Branching graphs as PipeDream partitions them: by the states that a computation passes.

A state is a set of layers that includes all predecessors of its layers: the work of a stage and of
the stages before it. A stage is the step from one state to another that includes it, and its cost
the difference between the two. PipeDream names a state by its *antichain*, the layers in it that
no other of its layers follows (Narayanan et al., PipeDream, SOSP 2019; its optimizer's
``Graph.antichain_dag``). A chain of L layers has L states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

from sparsepipe.errors import ProfileError
from sparsepipe.profiling.graph_txt import Graph, chain_profile
from sparsepipe.profiling.profile import Profile, State

MOST_STATES = 3_000
"""A search looks at all pairs of states."""


def graph_profile(graph: Graph, *, meta: Mapping[str, Any]) -> Profile:
    """A graph as a profile: its layers if they form a chain, else its nodes and states."""
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
    """The states of a graph, each after those that it includes; the last one is all layers.

    States of as many layers keep the order in which a search through the graph, breadth first
    from its first layer, meets them. Each layer's output counts once, and only where a layer
    outside waits for it; PipeDream also counts some outputs that no stage outside needs.
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
                f"the graph has more than {MOST_STATES:,} states: too many branches run abreast",
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
