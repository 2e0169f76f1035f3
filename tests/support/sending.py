"""The two ends of what a sender may do, between which trainings are."""

from __future__ import annotations

from sparsepipe.simulate.network import Sends

FREELY = Sends()
"""Nobody waits for anybody but for what he needs."""
RENDEZVOUS = Sends(outbox=0, inbox=0)
"""Both ends wait until a message has come."""
