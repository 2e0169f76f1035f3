"""SmartProfile: the costs of each layer on a device, measured or read from a file."""

from sparsepipe.profiling.graph_txt import (
    Graph,
    antichain_states,
    chain_profile,
    graph_profile,
    parse_graph,
    read_graph,
)
from sparsepipe.profiling.profile import LayerProfile, Profile, State, check_agreement, check_there

__all__ = [
    "Graph",
    "LayerProfile",
    "Profile",
    "State",
    "antichain_states",
    "chain_profile",
    "check_agreement",
    "check_there",
    "graph_profile",
    "parse_graph",
    "read_graph",
]
