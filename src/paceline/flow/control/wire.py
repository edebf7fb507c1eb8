# SPDX-License-Identifier: Apache-2.0
"""The control plane's frames: kinds, and numbers in their headers. Everything else is in their notes; no bodies.

A worker has two connections: one for requests, and one for heartbeats, which nothing else delays.
"""

from __future__ import annotations

HELLO, BACK, PULSE = 1, 2, 3
"""First frames: a new worker (its description); one that reconnects: (worker, holding, started, generation
that it knows), its leases and its secret; heartbeats: (worker), its secret."""
BEAT = 4
"""(steps), its activity."""
STARTS, COMMIT, FAILED, HOLDS, ASK, TELL, LEDGER, BYE = range(5, 13)
"""(exchange, 1 if this worker leaves after it); (serial, generation, exchange), marks and facts; (serial, generation),
why and suspects; (generation, exchanges in it, wanted members); (serial, loader, epoch, total, unit, most, dry);
(serial), kind and values; (serial); (FINISHED, LEAVES or LEAVES_ANYWAY)."""
FINISHED, LEAVES, LEAVES_ANYWAY = range(3)
"""Goodbyes: at the end of the program; before it, unless this worker alone holds the state; or even then."""

WELCOME = 64
"""To HELLO and BACK: (worker), its secret and the terms. To PULSE: nothing. All say which start of the server it is."""
REFUSED = 65
"""Why this worker cannot be accepted."""
BEATEN = 66
"""To a BEAT."""
# New ones go to the end: a message's number is its place here.
_MESSAGES = (
    *("given_up", "generation", "paused", "called", "verdict", "newer", "answer", "ack", "books", "wrong", "news"),
    *("check", "farewell", "held", "alone"),
)
MESSAGE_KINDS = {kind: number for number, kind in enumerate(_MESSAGES, 67)}
"""The state machine's messages, and the kinds of their frames: (serial, numbers..), note.

A verdict is (serial, 1, generation, exchange, donor, wanted members) if the exchange is committed. It has the
generation as its note if the members have changed, or if the commit had been sent again. It is (serial, 0) and the
newest generation if the exchange must be repeated.
"""
MESSAGE_NAMES = {number: kind for kind, number in MESSAGE_KINDS.items()}
