# SPDX-License-Identifier: Apache-2.0
"""Failover after a loss: the successor takes over the shards, and pending requests are sent to it."""

from __future__ import annotations

import contextlib

from paceline.errors import PacelineError
from paceline.update.server.failures import Loss
from paceline.update.server.frames import FrameKind
from paceline.update.server.owner import PULLED
from paceline.update.server.parts import ServiceParts
from paceline.update.server.shard import LEDGER_SHARD


class Failover:
    """Carries out a failover on this worker."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts, self._context = parts, parts.context

    def lost(self, loss: Loss) -> None:
        """Fail over after a loss; `changed` is held."""
        parts, own = self._parts, loss.successor == self._context.world.rank
        self._context.reports.lost(loss.rank, loss.why, [loss.successor] if loss.moved else [])
        if own:
            self._take_over(loss.rank, loss.moved)
        parts.peers.say_all(FrameKind.OUT, (loss.rank, int(loss.gone)), note=loss.why)
        self._dismiss(loss.rank, loss.why)
        if loss.was_successor:  # the replicas are gone with it
            parts.durability.renew(set(self._context.server.shards) - set(loss.moved if own else ()))
        parts.exchanges.request_again(loss.successor, set(loss.moved))
        parts.ledger_client.lost(loss.rank, LEDGER_SHARD in loss.moved)

    def _dismiss(self, rank: int, why: str) -> None:
        """Tell a lost worker so, over any connection that still works, and close both."""
        peer, incoming = self._parts.peers.remote[rank], self._parts.peers.incoming[rank]
        for channel in (peer.channel, incoming):
            with contextlib.suppress(PacelineError, OSError):
                self._context.send(channel, FrameKind.OUT, (rank,), note=why, deadline_s=0.1)
        peer.close()
        incoming.close()

    def _take_over(self, rank: int, shards: list[int]) -> None:
        """Become the owner of a lost worker's shards."""
        context = self._context
        made = [context.server.adopt(shard) for shard in shards]
        self._parts.durability.renew(shards)
        for source in sorted({source for _, source in made}):
            context.reports.takeover(rank, max(version for version, what in made if what == source), source)
        world = context.world
        if PULLED in {source for _, source in made}:
            context.reports.inexact(
                f"slices of {world.name(rank)} went with the worker that kept their replica: they go on from what "
                f"{world.name(world.rank)} pulled last, so that some of the newest updates of all workers are lost "
                "there, and others may be in them twice"
            )
