"""The states of a branching graph, against all sets of layers that are closed."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from sparsepipe.errors import ProfileError
from sparsepipe.profiling import Graph, antichain_states, graph_profile, parse_graph
from sparsepipe.profiling import graph_txt as module


def graph(edges: dict[int, list[int]]) -> Graph:
    """Layer n takes n + 1 ms, and has 10 n parameter and 2^n activation bytes."""
    nodes = "".join(
        f"n{n} -- Layer{n}() -- forward_compute_time={n + 1}.0, backward_compute_time=0.0, "
        f"activation_size={2**n}.0, parameter_size={10 * n}.0\n"
        for n in edges
    )
    return parse_graph(nodes + "".join(f"\tn{a} -- n{b}\n" for a in edges for b in edges[a]))


def test_a_diamond_by_hand() -> None:
    states = antichain_states(graph({0: [1, 2], 1: [3], 2: [3], 3: []}))
    told = [(state.antichain, state.cut_bytes) for state in states]
    # After n0 and n1, n2 waits for the output of n0 and n3 for that of n1.
    assert told == [
        (("n0",), 1.0),
        (("n1",), 1.0 + 2.0),
        (("n2",), 1.0 + 4.0),
        (("n1", "n2"), 2.0 + 4.0),
        (("n3",), 0.0),
    ]
    assert [state.compute_s for state in states] == pytest.approx(
        [0.001, 0.003, 0.004, 0.006, 0.01]
    )
    assert states[0].within(states[1])
    assert not states[1].within(states[2])


@pytest.mark.parametrize("seed", range(30))
def test_states_are_all_closed_sets_with_the_first_layer(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 9)
    edges: dict[int, list[int]] = {n: [] for n in range(size)}
    for later in range(1, size):
        for earlier in rng.sample(range(later), min(later, rng.randint(1, 2))):
            edges[earlier].append(later)
    found = antichain_states(graph(edges))
    closed = {
        frozenset(layers)
        for count in range(1, size + 1)
        for layers in combinations(range(size), count)
        if all(a in layers for a in edges for b in edges[a] if b in layers) and 0 in layers
    }
    assert {members(state.layers) for state in found} == closed
    assert len(found) == len(closed)
    for state in found:
        inside = members(state.layers)
        waited = {a for a in inside if any(b not in inside for b in edges[a])}
        assert state.cut_bytes == sum(2**a for a in waited)
        assert state.parameter_bytes == sum(10 * n for n in inside)
        assert state.input_bytes == sum(2**a for a in edges for b in edges[a] if b in inside)
    order = {state.layers: place for place, state in enumerate(found)}
    assert all(
        order[a.layers] < order[b.layers]
        for a in found
        for b in found
        if a.within(b) and a.layers != b.layers
    )


def test_a_chain_has_a_state_for_each_layer() -> None:
    states = antichain_states(graph({0: [1], 1: [2], 2: []}))
    assert [state.antichain for state in states] == [("n0",), ("n1",), ("n2",)]


def test_too_many_branches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STATES", 20)
    with pytest.raises(ProfileError, match=r"20 states.*parallel"):
        antichain_states(graph({0: [1, 2, 3, 4, 5], **{n: [6] for n in range(1, 6)}, 6: []}))


def test_a_profile_of_a_graph_has_its_nodes_and_states() -> None:
    diamond = graph({0: [1, 2], 1: [3], 2: [3], 3: []})
    found = graph_profile(diamond, meta={"source": "here"})
    assert [layer.name for layer in found.layers][:2] == ["n0 -- Layer0()", "n1 -- Layer1()"]
    assert found.states == tuple(antichain_states(diamond))
    assert found.compute_s == pytest.approx(found.states[-1].compute_s)
    chain = graph_profile(graph({0: [1], 1: []}), meta={})
    assert (chain.num_layers, chain.states) == (2, ())


def test_inputs_count_for_the_nodes_that_read_them() -> None:
    figures = "forward_compute_time=1.0, backward_compute_time=0.0, activation_size={}.0, "
    nodes = {"x": "Input0", "y": "Input1", "a": "Embed()", "b": "Embed()", "c": "Add()"}
    text = "".join(
        f"{name} -- {layer} -- {figures.format(10**n)}parameter_size=0.0\n"
        for n, (name, layer) in enumerate(nodes.items())
    )
    edges = [("x", "a"), ("x", "b"), ("y", "b"), ("a", "b"), ("a", "c"), ("b", "c")]
    read = parse_graph(text + "".join(f"\t{a} -- {b}\n" for a, b in edges))
    found = graph_profile(read, meta={})
    assert found.input_bytes == 1 + 10
    # a reads x; b reads x, y and what a gives, of 100 bytes; c what a and b give.
    assert [state.antichain for state in found.states] == [("a",), ("b",), ("c",)]
    assert [state.input_bytes for state in found.states] == [1, 1 + 111, 1 + 111 + 1100]
    assert graph_profile(read, meta={"input_bytes": 5}).input_bytes == 5


def members(bits: int) -> frozenset[int]:
    return frozenset(n for n in range(bits.bit_length()) if bits >> n & 1)
