# SPDX-License-Identifier: Apache-2.0
"""Where the connections of other workers come in: one door for all transports of a process.

Who comes says first for which connection (its label), and who he is (his rank there). A label that is not known yet is
one of which the others have heard earlier: the connection waits. A stranger is sent away and keeps nobody waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.communication.ring.link import abandon
from paceline.communication.ring.wire import HELLO
from paceline.communication.sockets.channel import TLS, Channel, Closed, Late, Listener
from paceline.communication.sockets.rejected import turned_away
from paceline.errors import PacelineError

LOG = logging.getLogger("paceline")
SWEEP_S = 0.25
"""Seconds between two looks for those who have waited long enough."""
GREETING_S = 5.0
"""Seconds within which a connection must say for whom it is."""
GREETINGS = 64
"""Connections that have not said it yet, at most; the oldest is closed for another one."""
WAITING = 1024
"""Connections for labels that are not known yet, at most; the oldest is closed for another one."""
PATIENCE_S = 3600.0
"""Seconds that one of those waits, at most; less where its sender is less patient."""
FORGOTTEN = 4096
"""Labels that are over and of which that is still known."""
LABEL = 200

Take = Callable[[int, Channel], bool]


@dataclass(frozen=True)
class _Guest:
    rank: int
    channel: Channel
    until: float


class RingListener:
    """Takes the connections of other workers, as long as the process trains.

    Args:
        address: the address of this host at which it listens; `own_address` finds one.
        tls: None for connections in the clear.
        port: 0 for any that is free.

    Attributes:
        address: as given.
        port: where it listens.
        tls: as given.

    Raises:
        UnsupportedError: it is not possible to listen there.
    """

    def __init__(self, address: str, tls: TLS | None = None, port: int = 0) -> None:
        self._listener = Listener(address, tls, port)
        self.address, self.port, self.tls = address, self._listener.port, tls
        self._lock = threading.Lock()
        self._closed = False
        self._greeting: deque[Channel] = deque()
        self._rooms: dict[str, Take] = {}
        self._waiting: OrderedDict[tuple[str, int], _Guest] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def open(self, label: str, take: Take) -> None:
        """Give connections for `label` to `take`, with the rank that each says; it answers whether it wants it."""
        with self._lock:
            if label in self._rooms or label in self._over:
                raise ValueError(f"the label {label!r} was used before: every set of members needs a new one")
            self._rooms[label] = take
            guests = [self._waiting.pop(key) for key in list(self._waiting) if key[0] == label]
        for guest in guests:
            self._bring(label, guest.rank, guest.channel)

    def forget(self, label: str) -> None:
        """`label` is over: send away who still comes for it."""
        with self._lock:
            self._rooms.pop(label, None)
            self._over[label] = None
            while len(self._over) > FORGOTTEN:
                self._over.popitem(last=False)

    def close(self) -> None:
        """Let nobody in any more; connections that were taken stay."""
        with self._lock:
            self._closed = True
            left = [*self._greeting, *(guest.channel for guest in self._waiting.values())]
            self._waiting.clear()
        self._listener.close()
        for channel in left:
            abandon(channel)
        if threading.current_thread() is not self._thread:
            self._thread.join(GREETING_S)

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._closed:
            if time.monotonic() >= swept + SWEEP_S:
                self._sweep()
                swept = time.monotonic()
            try:
                channel = self._listener.accept(SWEEP_S)
            except Late:
                continue
            except Closed:
                return
            except OSError as error:  # no file descriptor left, for one
                LOG.warning("the door at %s, port %d, could not take a connection: %s", self.address, self.port, error)
                time.sleep(0.1)
            else:
                self._greet(channel)

    def _greet(self, channel: Channel) -> None:
        oldest = None
        with self._lock:
            if len(self._greeting) >= GREETINGS:
                oldest = self._greeting.popleft()
            self._greeting.append(channel)
        if oldest is not None:
            abandon(oldest)
        threading.Thread(target=self._listen, args=(channel,), name="greeting", daemon=True).start()

    def _listen(self, channel: Channel) -> None:
        """Hear for whom a connection is."""
        channel.limit = 0
        try:
            frame = channel.receive(deadline_s=GREETING_S)
            label, rank = frame.note, frame.numbers[0]
            if frame.kind != HELLO or not isinstance(label, str) or len(label) > LABEL or rank < 0:
                raise PacelineError(f"it does not say for whom it is: {_short(frame.note)}")
        except (PacelineError, ValueError) as error:
            self._turn_away(channel, str(error))
        else:
            until = time.monotonic() + min(max(frame.numbers[1] / 1000, SWEEP_S), PATIENCE_S)
            self._place(label, _Guest(rank, channel, until))
        finally:
            with self._lock:
                if channel in self._greeting:
                    self._greeting.remove(channel)

    def _place(self, label: str, guest: _Guest) -> None:
        pushed: _Guest | None = None
        with self._lock:
            over = label in self._over
            reason = "the door is closed" if self._closed else "it is over" if over else ""
            known = label in self._rooms
            if not reason and not known:
                if (label, guest.rank) in self._waiting:
                    reason = "another one waits for it"
                else:
                    self._waiting[label, guest.rank] = guest
                    if len(self._waiting) > WAITING:
                        pushed = self._waiting.popitem(last=False)[1]
        if pushed is not None:
            self._turn_away(pushed.channel, f"more than {WAITING} connections wait for what nobody has begun")
        if reason:
            # who broke off later than the others is no stranger
            self._turn_away(guest.channel, f"it comes for {label!r} as rank {guest.rank}, and {reason}", expected=over)
        elif known:
            self._bring(label, guest.rank, guest.channel)

    def _bring(self, label: str, rank: int, channel: Channel) -> None:
        with self._lock:
            take = self._rooms.get(label)
        if take is None or not take(rank, channel):
            self._turn_away(channel, f"it comes for {label!r} as rank {rank}, which is not awaited there")

    def _sweep(self) -> None:
        """Send away who has waited long enough."""
        now = time.monotonic()
        with self._lock:
            late = [key for key, guest in self._waiting.items() if guest.until < now]
            guests = [self._waiting.pop(key) for key in late]
        for (label, rank), guest in zip(late, guests, strict=True):
            self._turn_away(guest.channel, f"it comes for {label!r} as rank {rank}, of which nobody here has heard")

    def _turn_away(self, channel: Channel, reason: str, expected: bool = False) -> None:
        if not self._closed:
            turned_away(channel.peer, reason, expected)
        abandon(channel)


def _short(note: Any) -> str:
    return repr(note)[:80]
