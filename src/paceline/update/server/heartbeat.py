# SPDX-License-Identifier: Apache-2.0
"""Sends heartbeats, and declares workers lost that send none."""

from __future__ import annotations

from paceline.update.server.context import ServiceContext
from paceline.update.server.failures import Failures
from paceline.update.server.membership import LOOK_EVERY_S, silence
from paceline.update.server.peers import Peers


class Heartbeat:
    """Sends heartbeats and looks for missing ones, whatever the training thread does meanwhile."""

    def __init__(self, context: ServiceContext, peers: Peers, failures: Failures) -> None:
        self._context, self._peers, self._failures = context, peers, failures
        self._silence_s = silence(context.timeout_s)

    def run(self) -> None:
        """The body of a thread, until the service closes."""
        while not self._context.closed.wait(min(LOOK_EVERY_S, self._silence_s / 4)):
            now = self._context.stall_detector.beat()
            self._context.news()
            for rank in self._context.membership.live:
                if rank != self._context.membership.rank:
                    self._look(rank, now)

    def _look(self, rank: int, now: float) -> None:
        stall_detector, members, peer = self._context.stall_detector, self._context.membership, self._peers.remote[rank]
        if now - peer.spoke_at > self._silence_s / 4:
            peer.beat()
        heard = max(members.heard[rank], peer.channel.heard_at, self._peers.incoming[rank].heard_at)
        since = peer.waiting_since
        if stall_detector.silent(heard) and rank not in members.confirmed:
            self._failures.declare_lost(rank, f"gave no sign of life for {self._silence_s:g} s")
        elif since is not None and stall_detector.overdue(since):
            self._failures.declare_lost(rank, f"did not answer within {self._context.timeout_s:g} s", gone=True)
