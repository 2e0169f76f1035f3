"""SmartProfile: what each layer costs on a device, measured or read from elsewhere."""

from sparsepipe.profiling.agreement import check_agreement
from sparsepipe.profiling.antichains import State, antichain_states
from sparsepipe.profiling.graph_txt import Graph, chain_profile, parse_graph, read_graph
from sparsepipe.profiling.profile import LayerProfile, Profile

__all__ = [
    "Graph",
    "LayerProfile",
    "Profile",
    "State",
    "antichain_states",
    "chain_profile",
    "check_agreement",
    "parse_graph",
    "read_graph",
]
