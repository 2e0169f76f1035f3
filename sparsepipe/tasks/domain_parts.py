"""Cuts a domain separation network into a chain of parts, whose costs task=profile measures."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.models.domain_losses import RECONSTRUCTIONS
from sparsepipe.models.domain_separation import DomainSeparation, Rows
from sparsepipe.models.dsn import DomainSeparationNetwork, of_domain

LOSSES = "losses"
"""Name of the last part, which computes the losses."""
State = dict[str, Any]
"""Tensors that a part passes to the next, by keys such as ``input/A`` and ``private/A``."""


def private_part(domain: str) -> str:
    """Name of the part that is a domain's private encoder."""
    return f"private/{domain}"


def parts_of(module: DomainSeparation) -> nn.Sequential:
    """Returns private encoder, shared encoder and decoder for each domain, then the losses."""
    network = module.network
    parts: dict[str, nn.Module] = {}
    for name in module.domains:
        parts[private_part(name)] = Private(network, name)
        parts[f"shared/{name}"] = Shared(network, name)
        parts[f"decoder/{name}"] = Decoder(network, name)
    parts[LOSSES] = Losses(module)
    return nn.Sequential(OrderedDict(parts))


def state_of(module: DomainSeparation, batch: Mapping[str, Any]) -> State:
    """Returns the input of the first part, made from a minibatch of all domains."""
    found: State = {f"input/{name}": module.cast(batch[name]["input"]) for name in module.domains}
    return {**found, "label": batch[module.domains[0]]["label"]}


def of_domains(module: DomainSeparation) -> dict[str, Any]:
    """Returns entries for a profile's ``meta``, from which task=simulate computes message sizes."""
    network = module.network
    return {
        "domains": list(module.domains),
        "code": network.code,
        "target_numbers": math.prod(network.decoded_shape),
    }


class Private(nn.Module):
    """The part that computes a domain's private codes from its samples."""

    def __init__(self, network: DomainSeparationNetwork, name: str) -> None:
        super().__init__()
        self.encoder, self.name = network.private[name], name

    def forward(self, state: State) -> State:
        with of_domain(self.encoder, self.name):
            codes_BC = self.encoder(state[f"input/{self.name}"])
        return {**state, f"private/{self.name}": codes_BC}


class Shared(nn.Module):
    """The part that computes a domain's shared codes, and the targets of its reconstructions."""

    def __init__(self, network: DomainSeparationNetwork, name: str) -> None:
        super().__init__()
        self.encoder, self.name = network.shared, name
        self._codes, self._decoded = network.shared_codes, network.decoded

    def forward(self, state: State) -> State:
        found = {**state}
        x = found.pop(f"input/{self.name}")
        (codes_BC,) = self._codes({self.name: x}).values()
        return {**found, f"shared/{self.name}": codes_BC, f"target/{self.name}": self._decoded(x)}


class Decoder(nn.Module):
    """The part that decodes a domain's codes, shared plus private, and computes sample errors."""

    def __init__(self, network: DomainSeparationNetwork, name: str) -> None:
        super().__init__()
        self.decoder, self.name = network.decoder, name
        self._error: Callable[..., Tensor] = RECONSTRUCTIONS[network.losses.reconstruction]

    def forward(self, state: State) -> State:
        found = {**state}
        target = found.pop(f"target/{self.name}")
        output = self.decoder(found[f"shared/{self.name}"] + found[f"private/{self.name}"])
        return {**found, f"error/{self.name}": self._error(output, target)}


class Losses(nn.Module):
    """The part that applies head, discriminator and losses to the codes of all domains."""

    def __init__(self, module: DomainSeparation) -> None:
        super().__init__()
        self.head, self.discriminator = module.network.head, module.network.discriminator
        self._domains, self._losses = module.domains, module.losses

    def forward(self, state: State) -> Tensor:
        def joined(kind: str) -> Tensor:
            return torch.cat([state[f"{kind}/{name}"] for name in self._domains])

        rows = Rows(
            shared_BC=joined("shared"),
            private_BC=joined("private"),
            error_B=joined("error"),
            label_B=state["label"],
            sizes={name: len(state[f"error/{name}"]) for name in self._domains},
        )
        return self._losses(rows).objective
