"""PipeDream's files are read exactly, and broken ones are refused with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.errors import ProfileError
from sparsepipe.profiling import Profile, chain_profile, parse_graph, read_graph

FIGURES = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
PROFILES = Path(__file__).parents[3] / "sparsepipe" / "assets" / "profiles" / "paper"


def line(name: str, layer: str, *figures: object) -> str:
    return f"{name} -- {layer} -- {FIGURES.format(*figures)}\n"


CHAIN = (
    line("node1", "Input0", 11.5, 0.0, 256.0, 0.0)
    + line("node2", "Conv3d(1, 64, kernel_size=[3, 3, 3], bias=None)", 6.097, 1.958, 52.0, 69.0)
    + line("node3", "ReLU()", 0.5, 0.25, "[30.0; 22.0]", 0.0).rstrip("\n")
    + " -- stage_id=1\n"
    + line("node4", "Linear(3, 4)", 1.0, 2.0, 8.0, 16.0)
    + line("node5", "__getitem__(0)", 0.0, 0.0, 8.0, 0.0)
    + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n\tnode3 -- node5\n"
)


def test_a_chain_becomes_a_profile() -> None:
    profile = chain_profile(parse_graph(CHAIN), meta={"device": "a"})
    assert [layer.kind for layer in profile.layers] == ["Conv3d", "ReLU", "Linear"]
    first, second, _ = profile.layers
    assert first.name == "Conv3d(1, 64, kernel_size=[3, 3, 3], bias=None)"
    assert (first.forward_s, first.backward_s) == (0.006097, 0.001958)
    assert (first.activation_bytes, first.parameter_bytes) == (52.0, 69.0)
    assert second.activation_bytes == 52.0
    assert profile.meta["device"] == "a"
    assert profile.input_bytes == 256.0  # of the node that is none of the layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no layers"),
        (line("a", "Conv3d", "fast", 0, 0, 0), "fast"),
        (line("a", "Conv3d", 1, 0, -5, 0), "-5"),
        (line("a", "Conv3d", 1, 0, 0, 0) * 2, "line 2.*a occurs twice"),
        (line("a", "Conv3d", 1, 0, 0, 0) + "\ta -- b\n", "line 2.*b"),
        (
            line("a", "x", 1, 0, 0, 0) + line("b", "x", 1, 0, 0, 0) + "\ta -- b\n\tb -- a\n",
            "cycle",
        ),
    ],
)
def test_malformed_lines_are_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        parse_graph(text)
    assert caught.value.remedy


def test_branches_are_no_chain() -> None:
    nodes = "".join(line(name, "x", 1, 1, 1, 1) for name in "abcd")
    graph = parse_graph(nodes + "\ta -- b\n\ta -- c\n\tb -- d\n\tc -- d\n")
    with pytest.raises(ProfileError, match="branches") as caught:
        chain_profile(graph, meta={})
    assert "graph_profile" in caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nothing\.txt"):
        read_graph(tmp_path / "nothing.txt")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("titan_v", "titanv_b64_graph.txt"),
        ("titan_xp", "titanxp_b64_graph.txt"),
        ("rtx_2080_ti", "rtx2080ti_b64_graph.txt"),
    ],
)
def test_the_profiles_we_ship_are_the_authors(file: str, source: str, check_data: Path) -> None:
    graph = check_data / "sparsepipe_profiles" / source
    if not graph.exists():
        pytest.skip("the authors' graph.txt files are not there")
    shipped = Profile.load(PROFILES / f"{file}.json")
    assert shipped.layers == chain_profile(read_graph(graph), meta={}).layers
    assert shipped.num_layers == 52
    assert "SparsePipe" in shipped.meta["source"]
