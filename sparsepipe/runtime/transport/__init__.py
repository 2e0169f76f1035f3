"""Messages between stages: trees of tensors, sent and received while ranks compute."""

from sparsepipe.runtime.transport.network import Network, SharedMessages
from sparsepipe.runtime.transport.serialization import (
    Kind,
    Message,
    Traffic,
    differentiable,
    message_name,
)

__all__ = [
    "Kind",
    "Message",
    "Network",
    "SharedMessages",
    "Traffic",
    "differentiable",
    "message_name",
]
