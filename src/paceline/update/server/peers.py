# SPDX-License-Identifier: Apache-2.0
"""The connections of a worker, and waits that keep them alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.communication.sockets.channel import Channel
from paceline.update.server.context import ServiceContext
from paceline.update.server.frames import FrameKind
from paceline.update.server.membership import LOOK_EVERY_S
from paceline.update.server.peer import Peer, SendQueue


class Peers:
    """The connections to all workers, by rank.

    Args:
        context: of the service.
        incoming: the connections that the other workers made to this one.

    Attributes:
        remote: the connections to the other workers.
        all: the same, and this worker's own queue.
    """

    def __init__(self, context: ServiceContext, incoming: dict[int, Channel]) -> None:
        self._context, self.incoming = context, incoming
        self.remote: dict[int, Peer] = {}
        self.all: dict[int, SendQueue] = {}

    def connect(self, remote: dict[int, Peer], own: SendQueue) -> None:
        """Take the connections, once they are made."""
        self.remote = remote
        self.all = {**remote, own.rank: own}

    def __getitem__(self, rank: int) -> SendQueue:
        return self.all[rank]

    @property
    def live(self) -> list[Peer]:
        """The connections to the other live workers."""
        members = self._context.membership
        return [self.remote[rank] for rank in members.live if rank != members.rank]

    def say_all(self, kind: FrameKind, numbers: tuple[int, ...], note: Any = None) -> None:
        """Send all other live workers a frame that has no answer."""
        with self._context.changed:
            for peer in self.live:
                peer.say(kind, numbers, note=note)

    def remind(self) -> None:
        """Send a frame to workers that get no requests, so that they do not declare this worker lost."""
        for peer in self.live:
            if self._context.stall_detector.beat() - peer.said_at > self._context.timeout_s / 4:
                peer.say(FrameKind.STILL_HERE, ())

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`; raises the failure of this worker."""
        while not ready():
            self._context.check()
            with self._context.changed:
                if not ready():
                    self._context.changed.wait(LOOK_EVERY_S)
                self.remind()

    def pause(self, seconds: float) -> None:
        """Wait for a change, at most so long; raises the failure of this worker."""
        self._context.check()
        with self._context.changed:
            self._context.changed.wait(seconds)
            self.remind()

    def close(self) -> None:
        """Close every connection."""
        for peer in self.all.values():
            peer.close()
        for channel in self.incoming.values():
            channel.close()
