# SPDX-License-Identifier: Apache-2.0
"""Connections of simulated machines: slow, cut, partitioned, and reset as TCP resets them.

Frames of a connection arrive in order; those of different connections do not. A partition holds what is sent until it
heals. An end that closes with unread frames, or to which frames come after that, resets the connection: the other end
loses what it has not read. A machine without power answers nothing, and its peers are not told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from devtools.world.locks import SimWaker
from devtools.world.scheduler import Scheduler, SimThread
from torch import Tensor

from paceline.communication.sockets.frames import (
    HEADER_BYTES,
    Closed,
    Frame,
    FrameHeader,
    Late,
    Outgoing,
    fitting,
    memory,
    read_note,
    write_note,
)
from paceline.communication.sockets.framing import Channel
from paceline.errors import MismatchError, UnsupportedError

LATENCY_S = (5e-5, 2e-3)
"""Of a frame, from least to most."""
KEEPALIVE_S = 60.0
"""Seconds until an end knows that the machine of the other one is gone: `framing` sets TCP so."""
DIAL_S = 1.0
"""Seconds until a connection into a partition has failed."""


class Home(Protocol):
    """A process, as far as its connections need it."""

    address: str
    channels: dict[SimChannel, None]
    listeners: dict[SimListener, None]

    def check(self) -> None:
        """Raise if it is dead."""


class SimNetwork:
    """All machines' connections.

    Attributes:
        slow_s: seconds that a frame may take in addition.
        byte_s: seconds for a byte of a connection.
        armed: so many frames from now, whether before or after the frame, what is called with its channel.
    """

    def __init__(self, world: Scheduler) -> None:
        self.world = world
        self.listeners: dict[tuple[str, int], SimListener] = {}
        self.channels: dict[SimChannel, None] = {}
        self.slow_s, self.byte_s = 0.0, 1e-9
        self.armed: tuple[int, bool, Callable[[SimChannel], None]] | None = None
        self._cut: dict[tuple[str, str], int] = {}  # from host, to host -> how many partitions
        self._held: list[tuple[str, str, Callable[[], None]]] = []
        self._next_port = 1024

    def port(self) -> int:
        """A free one."""
        self._next_port += 1
        return self._next_port

    # -- faults -----------------------------------------------------------------------------------

    def cut(self, sender: str, receiver: str) -> None:
        """From now on nothing comes from one host to the other."""
        self._cut[sender, receiver] = self._cut.get((sender, receiver), 0) + 1

    def heal(self, sender: str, receiver: str) -> None:
        """End that; what was sent meanwhile arrives."""
        left = self._cut.get((sender, receiver), 0) - 1
        if left > 0:
            self._cut[sender, receiver] = left
            return
        self._cut.pop((sender, receiver), None)
        held, self._held = self._held, []
        for one in held:
            self.carry(*one, 0.0)

    def reset(self, channel: SimChannel) -> None:
        """A connection ends at both ends, with all that is under way."""
        channel.broken("Connection reset by peer")
        channel.other.broken("Connection reset by peer")

    def vanish(self, host: str) -> None:
        """A machine loses its power: its ends are gone, and the others learn nothing of it before KEEPALIVE_S."""
        for channel in [one for one in self.channels if one.host == host]:
            channel.vanished = True
            self.channels.pop(channel, None)
            self.world.after(KEEPALIVE_S, partial(channel.other.broken, "Connection timed out"))

    def carry(self, sender: str, receiver: str, call: Callable[[], None], seconds: float) -> None:
        """Call after so many seconds, or later if the hosts are cut off from each other then."""

        def arrive() -> None:
            if (sender, receiver) in self._cut:
                self._held.append((sender, receiver, call))
            else:
                call()

        self.world.after(seconds, arrive)

    def counted(self) -> tuple[bool, Callable[[SimChannel], None]] | None:
        """Count a frame; what to call at it, and whether before it has left."""
        if self.armed is None:
            return None
        left, before, call = self.armed
        self.armed = None if left <= 1 else (left - 1, before, call)
        return None if left > 1 else (before, call)

    def latency(self) -> float:
        """Of a frame."""
        low, high = LATENCY_S
        return low + (high - low) * self.world.rng.random() ** 3 + self.slow_s * self.world.rng.random()

    def reachable(self, one: str, other: str) -> bool:
        """Whether frames come both ways."""
        return (one, other) not in self._cut and (other, one) not in self._cut


class SimListener:
    """What :class:`paceline.communication.sockets.channel.Listener` is."""

    def __init__(self, network: SimNetwork, process: Home, address: str, port: int) -> None:
        self._network, self._process = network, process
        self.address, self.port = address, port or network.port()
        if (address, self.port) in network.listeners:
            raise UnsupportedError(f"cannot listen at {address}, port {port}: Address already in use")
        self._waiting: deque[SimChannel] = deque()
        self._accepting: list[SimThread] = []
        self._closed = False
        network.listeners[address, self.port] = self
        process.listeners[self] = None

    def offer(self, channel: SimChannel) -> None:
        """A connection has come."""
        self._waiting.append(channel)
        self._wake()

    def accept(self, timeout_s: float) -> SimChannel:
        world = self._network.world
        until = world.now + timeout_s
        while not self._waiting:
            if self._closed:
                raise Closed(f"the listener at {self.address}, port {self.port}, is closed")
            self._accepting.append(world.current)
            if not world.park(until):
                raise Late(f"no peer has connected to {self.address}, port {self.port}, within {timeout_s:g} s")
        return self._waiting.popleft()

    def accept_while(self, wanted: Callable[[], bool]) -> Iterator[SimChannel]:
        while wanted():
            try:
                yield self.accept(1.0)
            except Late:
                continue
            except Closed:
                return

    def close(self) -> None:
        self._closed = True
        self._network.listeners.pop((self.address, self.port), None)
        self._process.listeners.pop(self, None)
        for channel in self._waiting:
            channel.close()
        self._wake()

    def __enter__(self) -> SimListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        waiting, self._accepting = self._accepting, []
        for one in waiting:
            self._network.world.wake(one)


class SimChannel:
    """What :class:`paceline.communication.sockets.framing.Channel` is: one end of a connection."""

    other: SimChannel

    def __init__(self, network: SimNetwork, process: Home, host: str, peer: str) -> None:
        self._network, self._world, self.process, self.host, self.peer = network, network.world, process, host, peer
        self.limit, self.stall_s, self.identity = 1 << 31, 60.0, None  # there are no certificates
        self.bytes_sent = self.bytes_received = 0
        self.heard_at = network.world.now
        self.closed = self.vanished = False
        self._why = ""  # no more frames will come
        self._inbox: deque[tuple[FrameHeader, bytes, bytes | None]] = deque()
        self._reading: list[SimThread] = []
        self._last = 0.0  # when the last frame under way arrives at the other end
        network.channels[self] = None
        process.channels[self] = None

    adjust = Channel.adjust

    def send(
        self,
        kind: int,
        numbers: Sequence[int] = (),
        body: Tensor | None = None,
        note: Any = None,
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        text = write_note(note)
        header = FrameHeader.of(kind, numbers, text, body)
        self._world.occasion()
        self._check()
        call = self._network.counted()
        if call is not None and call[0]:
            call[1](self)
            self.process.check()
        if self._why and "reset" in self._why:
            self.close()
            raise Closed(f"the connection to {self.peer} is lost: {self._why}")
        size = HEADER_BYTES + header.note_bytes + header.body_bytes
        self.bytes_sent += size
        frame = (header, text, None if body is None else bytes(memory(body)))
        self._to_other(lambda other: other.arrived(frame), size)
        if call is not None and not call[0]:
            call[1](self)

    def send_all(self, frames: Iterable[Outgoing], *_: Any, **__: Any) -> None:
        for frame in frames:
            self.send(*frame)

    def _to_other(self, call: Callable[[SimChannel], None], size: int = 0) -> None:
        network, world = self._network, self._world
        arrives = max(self._last, world.now + network.latency()) + size * network.byte_s
        self._last = arrives + 1e-9
        network.carry(self.host, self.other.host, lambda: call(self.other), arrives - world.now)

    def arrived(self, frame: tuple[FrameHeader, bytes, bytes | None]) -> None:
        """A frame has come to this end."""
        if self.vanished:
            return
        if self.closed:
            self._to_other(lambda other: other.broken("Connection reset by peer"))
        elif not self._why:
            self._inbox.append(frame)
            self._wake()

    def broken(self, why: str) -> None:
        """The connection was reset: what was not read is lost."""
        if not self.vanished and not self.closed:
            self._inbox.clear()
            self._why = why
            self._wake()

    def ended(self) -> None:
        """The other end has closed; what came before can be read."""
        if not self._why:
            self._why = "closed"
            self._wake()

    def receive(
        self, buffer: Tensor | Callable[[FrameHeader], Tensor] | None = None, deadline_s: float | None = None
    ) -> Frame:
        world = self._world
        until = None if deadline_s is None else world.now + deadline_s
        world.occasion()
        while not self._inbox:
            self._check()
            if self._why:
                self.close()
                if self._why == "closed":
                    raise Closed(f"{self.peer} closed the connection: it has ended or died")
                raise Closed(f"the connection to {self.peer} is lost: {self._why}")
            self._reading.append(world.current)
            if not world.park(until):
                raise Late(f"{self.peer} did not answer in time")
        self._check()
        header, text, data = self._inbox.popleft()
        try:
            header = FrameHeader.read(header.pack(), self.limit)
            self.heard_at = world.now
            self.bytes_received += HEADER_BYTES + header.note_bytes + header.body_bytes
            return Frame(header.kind, header.numbers, self._body(header, data, buffer), read_note(text))
        except MismatchError as error:
            self.close()
            raise MismatchError(f"from {self.peer}: {error}; the connection is closed") from error

    def _body(
        self, header: FrameHeader, data: bytes | None, buffer: Tensor | Callable[[FrameHeader], Tensor] | None
    ) -> Tensor | None:
        if header.dtype is None or data is None:
            return None
        if buffer is None:
            body = torch.empty(header.numel, dtype=header.dtype)
        else:
            body = buffer if isinstance(buffer, Tensor) else buffer(header)
        view = fitting(body, header)
        view[:] = data
        return body

    def takes(self) -> bool:
        return not self.closed

    def waker(self) -> SimWaker:
        return SimWaker(self._world)

    def wait(self, other: SimWaker | None, deadline: float | None = None) -> bool:
        self._world.occasion()
        self._check()
        me = self._world.current
        while not (self.readable() or (other is not None and other.woken)):
            self._reading.append(me)
            if other is not None:
                other.waiting = me
            on_time = self._world.park(deadline)
            if me in self._reading:  # else a later wake-up would end another wait of this thread
                self._reading.remove(me)
            if other is not None:
                other.waiting = None
            if not on_time:
                break
        self._check()
        return self.readable()

    def readable(self) -> bool:
        return bool(self._inbox or self._why or self.closed)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._network.channels.pop(self, None)
        self.process.channels.pop(self, None)
        if not self.vanished:
            if self._inbox:  # unread: the kernel resets
                self._to_other(lambda other: other.broken("Connection reset by peer"))
            else:
                self._to_other(lambda other: other.ended())
        self._inbox.clear()
        self._wake()

    def abandon(self) -> None:
        self.close()

    def __enter__(self) -> SimChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self.closed:
            raise Closed(f"the connection to {self.peer} was closed here before this was over")

    def _wake(self) -> None:
        waiting, self._reading = self._reading, []
        for one in waiting:
            self._world.wake(one)


class ProcessNetwork:
    """The network as a process has it."""

    def __init__(self, network: SimNetwork, process: Home) -> None:
        self._network, self._process = network, process

    def listen(self, address: str, port: int) -> SimListener:
        return SimListener(self._network, self._process, address, port)

    def connect(self, address: str, port: int, peer: str, timeout_s: float) -> SimChannel:
        network, world, host = self._network, self._network.world, self._process.address
        until, pause = world.now + timeout_s, 0.01
        while True:
            reachable = network.reachable(host, address)
            world.sleep(network.latency() if reachable else min(DIAL_S, max(0.0, until - world.now)))
            listener = network.listeners.get((address, port)) if network.reachable(host, address) else None
            if listener is not None:
                break
            if until - world.now <= pause:
                why = "Connection refused" if reachable else "timed out"
                raise Late(f"{peer} at {address}, port {port}, cannot be reached within {timeout_s:g} s: {why}")
            world.sleep(pause)
            pause = min(2 * pause, 0.5)
        mine = SimChannel(network, self._process, host, peer)
        theirs = SimChannel(network, listener._process, address, f"{host}:{network.port()}")
        mine.other, theirs.other = theirs, mine
        listener.offer(theirs)
        return mine
