# SPDX-License-Identifier: Apache-2.0
"""What the control plane's frames are: kinds, and numbers in their headers. All else is in their notes; no bodies.

A worker has two connections: it talks over one, and its heartbeats have the other, which nothing else holds up.
"""

from __future__ import annotations

HELLO, BACK, PULSE = 1, 2, 3
"""First frames: a new worker (what it says about itself); one that comes back: (worker, holding, started), what it
holds and its secret; heartbeats: (worker), its secret."""
BEAT = 4
"""(steps), what it does."""
STARTS, COMMIT, FAILED, HOLDS, ASK, TELL, LEDGER, BYE = range(5, 13)
"""(exchange); (serial, generation, exchange), marks and facts; (serial, generation), why and suspects; (generation,
exchanges in it); (serial, loader, epoch, total, unit, most, dry); (serial), kind and values; (serial); nothing."""

WELCOME = 64
"""To HELLO and BACK: (worker), its secret and the terms. To PULSE: nothing."""
REFUSED = 65
"""Why: this worker cannot be taken."""
BEATEN = 66
"""To a BEAT."""
SAID = {
    "given_up": 67,
    "generation": 68,
    "paused": 69,
    "called": 70,
    "verdict": 71,
    "newer": 72,
    "answer": 73,
    "ack": 74,
    "books": 75,
    "wrong": 76,
    "news": 77,
    "check": 78,
    "farewell": 79,
}
"""What the state machine says, and the kinds of the frames: (serial, numbers..), note."""
KINDS = {number: kind for kind, number in SAID.items()}
