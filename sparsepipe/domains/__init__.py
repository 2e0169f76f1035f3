"""Domains of data on several devices: exchange of codes, gradients of shared parameters."""

from sparsepipe.domains.exchange import OneGrid, OneLossRank, SharedLosses
from sparsepipe.domains.placement import Placement, Roles, sent_numbers

__all__ = ["OneGrid", "OneLossRank", "Placement", "Roles", "SharedLosses", "sent_numbers"]
