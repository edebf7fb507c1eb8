# SPDX-License-Identifier: Apache-2.0
"""What all parts of a worker's socket service share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.sockets.channel import Channel
from paceline.communication.sockets.frames import Outgoing
from paceline.core import runtime
from paceline.core.world import World
from paceline.update.monitor import Monitor
from paceline.update.server.membership import ServerMembership, StallDetector
from paceline.update.server.owner import ShardServer


@dataclass
class ServiceContext:
    """What all parts of a worker's socket service share.

    Attributes:
        transport: the connection over which workers found each other; it counts the bytes.
        server: the shards that this worker owns.
        membership: which workers take part.
        reports: takes reports about lost workers.
        timeout_s: deadline of every wait for another worker, seconds.
        changed: guards membership and pending exchanges; notified when they change.
        stall_detector: detects that this process was stopped.
        closed: set when the connections are closed.
        failure: why this worker cannot go on.
        watchers: called when clocks or members may have changed, and at each heartbeat; they must not wait.
    """

    transport: Transport
    server: ShardServer
    membership: ServerMembership
    reports: Monitor
    timeout_s: float
    changed: threading.Condition = field(init=False, default_factory=lambda: runtime.Condition(runtime.RLock()))
    stall_detector: StallDetector = field(init=False)
    closed: threading.Event = field(init=False, default_factory=runtime.Event)
    failure: BaseException | None = field(init=False, default=None)
    watchers: list[Callable[[], None]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.stall_detector = StallDetector(self.timeout_s)

    @property
    def world(self) -> World:
        """The workers, as messages name them."""
        return self.transport.world

    @property
    def over(self) -> bool:
        """Whether this worker has failed or closes its connections."""
        return self.closed.is_set() or self.failure is not None

    def news(self) -> None:
        """Wake all that wait for a change."""
        with self.changed:
            self.changed.notify_all()
        for call in self.watchers:
            call()

    def fail(self, error: BaseException) -> None:
        """Make all waits of this worker raise `error`."""
        with self.changed:
            if not self.over:
                self.failure = error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

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
        """Send a frame and count its bytes; the default deadline is the user's."""
        self.send_all(channel, [(kind, numbers, body, note)], deadline_s, meanwhile)

    def send_all(
        self,
        channel: Channel,
        frames: Sequence[Outgoing],
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send frames, each with that deadline, and count their bytes."""
        before = channel.bytes_sent
        channel.send_all(frames, deadline_s or self.timeout_s, meanwhile)
        self.transport.sent(channel.bytes_sent - before)
