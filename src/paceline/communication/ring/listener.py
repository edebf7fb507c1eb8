# SPDX-License-Identifier: Apache-2.0
"""Accepts the connections of other workers: one listener for all ring transports of a process.

A connection first says its label (the transport that it is for) and its rank there. A connection with a label that is
not registered yet waits, because other workers may learn of a new set of members earlier. A wrong or silent connection
is closed and delays no other.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.communication.ring.wire import HELLO, Address
from paceline.communication.sockets.channel import TLS, Channel, Closed, Late, connect, listen
from paceline.communication.sockets.rejected import turned_away
from paceline.core import runtime
from paceline.errors import PacelineError

LOG = logging.getLogger("paceline")
SWEEP_S = 0.25
"""Seconds between two checks for connections that have waited too long."""
HELLO_S = 5.0
"""Seconds within which a connection must send its hello."""
MOST_WITHOUT_HELLO = 64
"""Most connections that have not sent it; a further one replaces the oldest."""
MOST_WAITING = 1024
"""Most connections for unregistered labels; a further one replaces the oldest."""
PATIENCE_S = 3600.0
"""Most seconds that one of those waits; less if its sender has a shorter timeout."""
MOST_CLOSED_LABELS = 4096
"""Most closed labels that are remembered."""
LABEL = 200
"""Most characters of a label."""

Take = Callable[[int, Channel], bool]
Dialers = Callable[[Callable[..., None]], Any]
"""Makes a dialer (`extensions.DIALERS`), which gives the connections that arrive there to the function."""


@dataclass(frozen=True)
class _Waiting:
    rank: int
    channel: Channel
    until: float


class RingListener:
    """Accepts the connections of other workers, as long as the process trains.

    Args:
        address: of this host, at which it listens; `own_address` finds one.
        tls: None for unencrypted connections.
        port: 0 for any that is free.
        dialers: by which members of other sites reach this one, and it reaches them; None where all connect directly.

    Attributes:
        address: as given.
        port: where it listens.
        tls: as given.
        dialer: what `dialers` made; None without one.

    Raises:
        UnsupportedError: it cannot listen there.
        PeerLostError: the dialer's relay cannot be reached in time.
    """

    def __init__(self, address: str, tls: TLS | None = None, port: int = 0, dialers: Dialers | None = None) -> None:
        self._listener = listen(address, tls, port)
        self.address, self.port, self.tls = address, self._listener.port, tls
        self._lock = runtime.Lock()
        self._closed = False
        self._without_hello: deque[Channel] = deque()
        self._takers: dict[str, Take] = {}
        self._waiting: OrderedDict[tuple[str, int], _Waiting] = OrderedDict()
        self._closed_labels: OrderedDict[str, None] = OrderedDict()
        try:
            self.dialer = None if dialers is None else dialers(self._listener.adopt)
        except BaseException:
            self._listener.close()
            raise
        self._thread = runtime.thread(self._run, "ring-listener")
        self._thread.start()

    def dial(self, to: Address, name: str, timeout_s: float, tls: TLS | None) -> Channel:
        """A channel to another member's listener; see `connect`."""
        if self.dialer is None or not to.relayed:
            return connect(to.address, to.port, name, timeout_s, tls)
        channel: Channel = self.dialer.dial((to.address, to.port), to.certificate, to.relayed, name, timeout_s)
        return channel

    def register(self, label: str, take: Take) -> None:
        """Give the connections for `label` to `take`, with their rank; it returns whether it wants them."""
        with self._lock:
            if label in self._takers or label in self._closed_labels:
                raise ValueError(f"the label {label!r} was used before: every set of members needs a new one")
            self._takers[label] = take
            waited = [self._waiting.pop(key) for key in list(self._waiting) if key[0] == label]
        for one in waited:
            self._give(label, one.rank, one.channel)

    def unregister(self, label: str) -> None:
        """Reject further connections for `label`."""
        with self._lock:
            self._takers.pop(label, None)
            self._closed_labels[label] = None
            while len(self._closed_labels) > MOST_CLOSED_LABELS:
                self._closed_labels.popitem(last=False)

    def close(self) -> None:
        """Accept no more connections; those that were given away stay open."""
        with self._lock:
            self._closed = True
            left = [*self._without_hello, *(one.channel for one in self._waiting.values())]
            self._waiting.clear()
        if self.dialer is not None:
            self.dialer.close()
        self._listener.close()
        for channel in left:
            channel.close()
        if runtime.current_thread() is not self._thread:
            self._thread.join(HELLO_S)

    def _run(self) -> None:
        swept = runtime.monotonic()
        while not self._closed:
            if runtime.monotonic() >= swept + SWEEP_S:
                self._sweep()
                swept = runtime.monotonic()
            try:
                channel = self._listener.accept(SWEEP_S)
            except Late:
                continue
            except Closed:
                return
            except OSError as error:  # for example, no file descriptor is left
                LOG.warning(
                    "the listener at %s, port %d, could not accept a connection: %s", self.address, self.port, error
                )
                runtime.sleep(0.1)
            else:
                self._accept(channel)

    def _accept(self, channel: Channel) -> None:
        with self._lock:
            oldest = self._without_hello.popleft() if len(self._without_hello) >= MOST_WITHOUT_HELLO else None
            self._without_hello.append(channel)
        if oldest is not None:
            oldest.close()
        runtime.thread(self._receive_hello, "ring-hello", (channel,)).start()

    def _receive_hello(self, channel: Channel) -> None:
        channel.adjust(limit=0)
        try:
            frame = channel.receive(deadline_s=HELLO_S)
            label, rank = frame.note, frame.numbers[0]
            if frame.kind != HELLO or not isinstance(label, str) or len(label) > LABEL or rank < 0:
                raise PacelineError(f"it does not say for whom it is: {frame.note!r:.80}")
        except (PacelineError, ValueError) as error:
            self._drop_without_hello(channel)
            self._reject(channel, str(error))
            return
        self._drop_without_hello(channel)  # before it is given away: `_accept` may close those that are listed
        until = runtime.monotonic() + min(max(frame.numbers[1] / 1000, SWEEP_S), PATIENCE_S)
        self._place(label, _Waiting(rank, channel, until))

    def _drop_without_hello(self, channel: Channel) -> None:
        with self._lock:
            if channel in self._without_hello:
                self._without_hello.remove(channel)

    def _place(self, label: str, one: _Waiting) -> None:
        replaced: _Waiting | None = None
        with self._lock:
            over, known = label in self._closed_labels, label in self._takers
            reason = "the listener is closed" if self._closed else "it is over" if over else ""
            if not reason and not known:
                if (label, one.rank) in self._waiting:
                    reason = "another one waits for it"
                else:
                    self._waiting[label, one.rank] = one
                    if len(self._waiting) > MOST_WAITING:
                        replaced = self._waiting.popitem(last=False)[1]
        if replaced is not None:
            self._reject(replaced.channel, f"more than {MOST_WAITING} connections wait for labels that are not in use")
        if reason:
            # a worker that broke off later than the others is expected
            self._reject(one.channel, f"it comes for {label!r} as rank {one.rank}, and {reason}", expected=over)
        elif known:
            self._give(label, one.rank, one.channel)

    def _give(self, label: str, rank: int, channel: Channel) -> None:
        with self._lock:
            take = self._takers.get(label)
        if take is None or not take(rank, channel):
            self._reject(channel, f"it comes for {label!r} as rank {rank}, which is not awaited there")

    def _sweep(self) -> None:
        """Reject connections that have waited too long."""
        now = runtime.monotonic()
        with self._lock:
            late = [key for key, one in self._waiting.items() if one.until < now]
            channels = [self._waiting.pop(key).channel for key in late]
        for (label, rank), channel in zip(late, channels, strict=True):
            self._reject(channel, f"it comes for {label!r} as rank {rank}, a label that is not in use here")

    def _reject(self, channel: Channel, reason: str, expected: bool = False) -> None:
        if not self._closed:
            turned_away(channel.peer, reason, expected)
        channel.close()
