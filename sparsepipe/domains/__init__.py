"""Domains of data on several devices: their placement, and the exchange of codes for losses."""

from sparsepipe.domains.exchange import OneGrid, OneLossRank, SharedLosses
from sparsepipe.domains.placement import Placement, Roles, sent_numbers

__all__ = ["OneGrid", "OneLossRank", "Placement", "Roles", "SharedLosses", "sent_numbers"]
