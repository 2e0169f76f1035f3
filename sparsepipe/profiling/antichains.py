"""Branching graphs as PipeDream partitions them: by the states that a computation passes.

A state is a set of layers that holds all layers before its own: what is done by a stage and by
those before it. A stage is the step from one state to another that includes it, and its cost the
difference between the two. PipeDream names a state by its *antichain*, the layers in it that
no other of its layers follows (Narayanan et al., PipeDream, SOSP 2019; its optimizer's
``Graph.antichain_dag``). A chain of L layers has L states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sparsepipe.errors import ProfileError
from sparsepipe.profiling.graph_txt import Graph, Node, chain_profile, input_of, layer_of
from sparsepipe.profiling.profile import Profile, State

MOST_STATES = 3_000
"""A search looks at all pairs of states."""


def graph_profile(graph: Graph, *, meta: Mapping[str, Any]) -> Profile:
    """A graph as a profile: its layers if they form a chain, else its nodes and states.

    Raises:
        ProfileError: there are more than :data:`MOST_STATES`.
    """
    if graph.chain() is not None:
        return chain_profile(graph, meta=meta)
    layers = tuple(
        replace(layer_of(node, n), name=f"{node.name} -- {node.text}")
        for n, node in enumerate(graph.nodes.values())
    )
    edges = {name: list(after) for name, after in graph.successors.items() if after}
    return Profile(
        layers=layers,
        meta={**input_of(graph), **meta, "edges": edges},
        states=tuple(antichain_states(graph)),
    )


def antichain_states(graph: Graph) -> list[State]:
    """The states of a graph, each after those that it includes; the last one is all layers.

    States of as many layers keep the order in which a search through the graph, breadth first
    from its first layer, meets them. Each layer's output counts once, and only where a layer
    outside waits for it; PipeDream also counts some outputs that no stage outside needs.

    Raises:
        ProfileError: there are more than :data:`MOST_STATES`.
    """
    links = _Links(graph)
    first = links.closed(next(n for n, before in enumerate(links.before) if not before))
    found = {first}
    queue = deque([first])
    while queue:
        layers = queue.popleft()
        for grown in links.grown(layers):
            if grown not in found:
                found.add(grown)
                queue.append(grown)
        if len(found) > MOST_STATES:
            raise ProfileError(
                f"the graph has more than {MOST_STATES:,} states: too many branches run abreast",
                remedy="merge the layers of a block into one node, or profile the model as a "
                "chain of blocks",
            )
    everything = (1 << len(links.nodes)) - 1
    order = sorted({*found, everything}, key=int.bit_count)
    return [links.state(layers) for layers in order]


class _Links:
    def __init__(self, graph: Graph) -> None:
        number = {name: place for place, name in enumerate(graph.nodes)}
        before = graph.predecessors()
        self.nodes: list[Node] = list(graph.nodes.values())
        self.before = [_bits(number[p] for p in before[name]) for name in graph.nodes]
        self.after = [_bits(number[s] for s in graph.successors[name]) for name in graph.nodes]
        self._given_bytes = [graph.given_bytes.get(name, 0.0) for name in graph.nodes]
        self._closed: dict[int, int] = {}

    def closed(self, node: int) -> int:
        """A node and all its predecessors."""
        waiting = [node]
        while waiting:
            top = waiting[-1]
            open_ = [p for p in _ones(self.before[top]) if p not in self._closed]
            if open_:
                waiting += open_
                continue
            done = 1 << top
            for p in _ones(self.before[top]):
                done |= self._closed[p]
            self._closed[waiting.pop()] = done
        return self._closed[node]

    def grown(self, layers: int) -> Iterator[int]:
        """States with one layer more, and that layer's predecessors."""
        seen = 0
        for node in _ones(layers):
            for successor in _ones(self.after[node] & ~layers & ~seen):
                yield layers | self.closed(successor)
            seen |= self.after[node]

    def state(self, layers: int) -> State:
        """The total cost of the layers."""
        members = [(n, self.nodes[n]) for n in _ones(layers)]
        return State(
            layers=layers,
            antichain=tuple(node.name for n, node in members if not self.after[n] & layers),
            compute_s=sum(node.forward_s + node.backward_s for _, node in members),
            parameter_bytes=sum(node.parameter_bytes for _, node in members),
            input_bytes=sum(
                self._given_bytes[n]
                + sum(self.nodes[p].activation_bytes for p in _ones(self.before[n]))
                for n, _ in members
            ),
            cut_bytes=sum(node.activation_bytes for n, node in members if self.after[n] & ~layers),
        )


def _bits(numbers: Iterator[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _ones(bits: int) -> Iterator[int]:
    """Indices of the set bits, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
