"""Messages between stages: typed trees of tensors, overlapped with compute both ways."""

from sparsepipe.runtime.transport.messages import Kind, Message, Traffic, message_name
from sparsepipe.runtime.transport.network import Network
from sparsepipe.runtime.transport.serialization import differentiable
from sparsepipe.runtime.transport.shared_messages import SharedMessages

__all__ = [
    "Kind",
    "Message",
    "Network",
    "SharedMessages",
    "Traffic",
    "differentiable",
    "message_name",
]
