"""How many messages lie at a rank, in training as in a simulation."""

from __future__ import annotations

INBOX_DEPTH = 1
"""Messages of one kind from one rank that lie ready before they are asked for. The next one is not
begun until this one is taken, so that a rank's memory does not depend on how far its peers are
ahead."""
