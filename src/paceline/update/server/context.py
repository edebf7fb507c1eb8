# SPDX-License-Identifier: Apache-2.0
"""What all parts of a worker's socket service share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.sockets.channel import Channel
from paceline.update.server.membership import ServerMembership, StallDetector
from paceline.update.server.owner import ShardServer


class Reports(Protocol):
    """Who is told what has become of workers."""

    def lost(self, rank: int, why: str, taken_over: Sequence[int]) -> None:
        """A worker is lost; who owns its slices from now on."""

    def takeover(self, slice_of: int, version: int, source: str) -> None:
        """This worker owns slices of a lost one, and what it made them of."""

    def inexact(self, what: str) -> None:
        """Some samples may not be in the model exactly once; which, as people read it."""


class Status:
    """Whether the service goes on.

    Attributes:
        failure: what has broken the cluster for this worker.
        closing: whether the connections are being closed.
        closed: set together with `closing`, for threads that wait.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.closing = False
        self.closed = threading.Event()


@dataclass(frozen=True)
class ServiceContext:
    """What all parts of a worker's socket service share.

    Attributes:
        transport: the connection over which workers found each other; its bytes are counted there.
        server: the shards that this worker owns.
        membership: who takes part.
        reports: hears what becomes of workers; from any thread.
        timeout_s: deadline of every wait for another worker, seconds.
        changed: guards membership and pending exchanges; notified when something of them changes.
        status: whether the service goes on.
        stall_detector: knows when this process stood still.
    """

    transport: Transport
    server: ShardServer
    membership: ServerMembership
    reports: Reports
    timeout_s: float
    changed: threading.Condition = field(init=False, default_factory=lambda: threading.Condition(threading.RLock()))
    status: Status = field(init=False, default_factory=Status)
    stall_detector: StallDetector = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stall_detector", StallDetector(self.timeout_s))

    @property
    def rank(self) -> int:
        """This worker."""
        return self.membership.rank

    @property
    def closing(self) -> bool:
        """Whether the connections are being closed."""
        return self.status.closing

    def fail(self, error: BaseException) -> None:
        """The cluster is broken for this worker: its waits raise this."""
        with self.changed:
            if not self.status.closing and self.status.failure is None:
                self.status.failure = error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise what has broken the cluster."""
        if self.status.failure is not None:
            raise self.status.failure

    def names(self, ranks: list[int]) -> str:
        """Workers as people read them."""
        return self.transport.world.names(ranks)

    def sign(self, message: str) -> str:
        """A message with this worker's rank and host."""
        return self.transport.world.sign(message)

    def send(
        self,
        channel: Channel,
        kind: int,
        numbers: tuple[int, ...],
        body: Tensor | None = None,
        note: Any = None,
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send a frame, and count its bytes; by the user's deadline where no other is given."""
        before = channel.bytes_sent
        channel.send(kind, numbers, body, note, deadline_s or self.timeout_s, meanwhile)
        self.transport.sent(channel.bytes_sent - before)
