"""Messages between stages: typed trees of tensors, overlapped with compute both ways."""

from sparsepipe.runtime.transport.codec import differentiable
from sparsepipe.runtime.transport.message import Kind, Message, Traffic, name_of_message
from sparsepipe.runtime.transport.network import Network

__all__ = ["Kind", "Message", "Network", "Traffic", "differentiable", "name_of_message"]
