# SPDX-License-Identifier: Apache-2.0
"""What a new owner knows of pieces whose owner was lost."""

from __future__ import annotations

import torch

from paceline.asynchronous.clocks import Clocks
from paceline.asynchronous.piece import Piece
from paceline.asynchronous.server import Server
from paceline.asynchronous.ways import Adds, Arriving
from paceline.outer import Share
from paceline.schedule.bounded import Bounded

WORKERS = 3


def piece(number: int, version: int = 0, fill: float = 0.0) -> Piece:
    clocks = Clocks(Bounded(staleness=1, overlap=0), range(WORKERS))
    made = Piece(number, torch.full((4,), fill), lambda anchor: Adds(Share()), clocks, False)
    made.version = version
    return made


def test_the_new_owner_learns_how_far_each_worker_is() -> None:
    """Without it worker 1 would be held back for worker 2, which is ahead of it and waits for it elsewhere."""
    server = Server(0, {}, piece)
    server.leave(0)
    server.adopt(7)
    out = torch.empty(4)
    assert not server.push(7, torch.zeros(4), Arriving(1, 5, 0, 1), out).may_start
    server.tick(2, [[7, 6], [8, 6]])  # of piece 8 somebody else is told
    assert server.may_start(7, 1)


def test_a_new_owner_begins_with_the_newest_values_it_knows() -> None:
    """The replica is taken where it is newer than what was pulled, and for the optimizer's state in any case."""
    for version, fill, wanted in ((9, 2.0, 2.0), (3, 2.0, 1.0)):
        old = piece(7, version=5, fill=1.0)
        server = Server(0, {}, lambda number, v=version, f=fill: piece(number, v, f))
        server.keep_replica(*old.snapshot())
        assert server.adopt(7) == (max(5, version), "replica")
        assert server.pieces[7].anchor.tolist() == [wanted] * 4
