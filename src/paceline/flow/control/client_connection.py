# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the control plane: it reconnects automatically, and resends unanswered requests."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.communication.sockets.channel import TLS, Channel, Closed, Frame, connect
from paceline.communication.sockets.identity import CONTROL, WORKER, refusal
from paceline.core import runtime
from paceline.errors import GivenUpError, MismatchError, OverError, PacelineError, PeerLostError, RefusedError
from paceline.flow.control import validation, wire

ATTEMPT_S = 2.0
"""Deadline of one attempt to reconnect, seconds."""
PAUSE_S = 0.1
"""Pause between two attempts to reconnect, seconds."""
FrameParts = tuple[int, tuple[int, ...], Any]
"""The kind of a frame, its numbers and its note."""
_CONNECTIONS: weakref.WeakSet[ClientConnection] = weakref.WeakSet()


class ConnectionOwner(Protocol):
    """The owner of a connection; called in the connection's thread, except for the first hello."""

    def hello(self) -> FrameParts:
        """The first frame of a connection."""

    def welcome(self, frame: Frame) -> None:
        """The answer to it."""

    def may_rejoin(self) -> bool:
        """Whether this worker, which the server no longer knows, may join as a new one."""

    def to_resend(self) -> list[FrameParts]:
        """The frames to send after every reconnect."""

    def received(self, frame: Frame) -> None:
        """Any other frame."""

    def ended(self, error: PacelineError) -> None:
        """The connection has ended with this error."""


@dataclass(frozen=True)
class ControlAddress:
    """Where the control plane is.

    Attributes:
        address: of its listener, or of the relay.
        port: of the same.
        tls: None for unencrypted connections.
        dial: (its name for messages, deadline in seconds) -> a channel to it, where it is not reached directly.
    """

    address: str
    port: int
    tls: TLS | None
    dial: Callable[[str, float], Channel] | None = None

    def __str__(self) -> str:
        return f"the control plane at {self.address}, port {self.port}"

    def connect(self, timeout_s: float) -> Channel:
        """A new connection to it; see `channel.connect`."""
        if self.dial is not None:
            return self.dial("the control plane", timeout_s)
        return connect(self.address, self.port, "the control plane", timeout_s, self.tls)


class ClientConnection:
    """The connection for requests.

    Args:
        where: the control plane is.
        timeout_s: seconds for which it tries to reconnect.
        owner: gets its frames.
    """

    def __init__(self, where: ControlAddress, timeout_s: float, owner: ConnectionOwner) -> None:
        self._where, self._timeout_s, self._owner = where, timeout_s, owner
        self._sending = runtime.Lock()
        self._pending: dict[int, FrameParts] = {}  # unanswered requests, in order
        self._closing = runtime.Event()
        self._thread = runtime.thread(self._run, "paceline-member")
        self._channel = self._connect(runtime.monotonic() + timeout_s)
        _CONNECTIONS.add(self)

    def start(self) -> None:
        """Start the receiving thread."""
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the server, for messages."""
        return str(self._where)

    def send(self, kind: int, numbers: tuple[int, ...] = (), note: Any = None) -> None:
        """Send a frame now, if there is a connection."""
        with self._sending, contextlib.suppress(PeerLostError):
            self._channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)

    def request(self, kind: int, numbers: tuple[int, ...], note: Any = None) -> None:
        """Send a request now, and on every new connection until :meth:`answered`; numbers[0] is its serial number."""
        with self._sending:
            self._pending[numbers[0]] = (kind, numbers, note)
            try:
                self._channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)
            except PeerLostError:
                pass  # it is sent on the next connection
            except BaseException:
                del self._pending[numbers[0]]
                raise

    def answered(self, serial: int) -> FrameParts | None:
        """Stop resending a request; returns it, or None if it was answered before."""
        with self._sending:
            return self._pending.pop(serial, None)

    def finish(self) -> None:
        """The server will close the connection: do not reconnect."""
        self._closing.set()

    def renew(self) -> None:
        """The server is another one than that to which this connects: connect anew."""
        self._channel.close()

    def close(self) -> None:
        """Close it."""
        self._closing.set()
        self._channel.close()
        if runtime.current_thread() is not self._thread:
            self._thread.join(5.0)

    def forget(self) -> None:
        """In a forked child: drop the connection, which belongs to the parent."""
        self._channel.abandon()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            silent_since: float | None = None  # no connection since then brought a frame
            while not self._closing.is_set():
                silent_since = None if self._receive() else self._pause_before_another(silent_since)
                if not self._closing.is_set():
                    self._reconnect()
        except PacelineError as error:
            if not self._closing.is_set():
                self._owner.ended(error)
        except Exception as error:  # a worker that waits for an answer must not wait for ever
            self._owner.ended(MismatchError(f"{self.name} sends invalid frames: {type(error).__name__}: {error}"))
        finally:
            self._channel.close()

    def _receive(self) -> bool:
        """Receive until this connection ends; returns whether a frame came."""
        came = False
        while True:
            try:
                frame = self._channel.receive()
            except PeerLostError:
                return came
            came = True
            self._owner.received(frame)

    def _pause_before_another(self, silent_since: float | None) -> float:
        """A connection ended before it brought a frame; returns since when that is so."""
        now = runtime.monotonic()
        since = now if silent_since is None else silent_since
        if now - since >= self._timeout_s:
            raise PeerLostError(
                f"{self.name}, has closed every connection for {now - since:.0f} s before it sent anything; see what "
                "its launcher printed"
            )
        self._closing.wait(PAUSE_S)
        return since

    def _reconnect(self) -> None:
        until = runtime.monotonic() + self._timeout_s
        while True:
            try:
                channel = self._connect(min(until, runtime.monotonic() + ATTEMPT_S))
                break
            except OverError:
                raise
            except GivenUpError:
                if not self._owner.may_rejoin():
                    raise
            except PeerLostError as error:
                if runtime.monotonic() >= until or self._closing.wait(PAUSE_S):
                    raise PeerLostError(
                        f"{self.name}, was lost and did not come back within {self._timeout_s:g} s ({error}); start it "
                        "again with its record, and then the workers"
                    ) from error
        with self._sending:
            self._channel = channel
            if self._closing.is_set():
                channel.close()
            with contextlib.suppress(PeerLostError):
                for kind, numbers, note in [*self._owner.to_resend(), *self._pending.values()]:
                    channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)

    def _connect(self, until: float) -> Channel:
        """Connect, and exchange hello and welcome."""
        channel = self._where.connect(max(0.1, until - runtime.monotonic()))
        try:
            _check_server(channel)
            channel.limit = 0
            kind, numbers, note = self._owner.hello()
            channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)
            answer = channel.receive(deadline_s=max(0.1, until - runtime.monotonic()))
            if answer.kind == wire.MESSAGE_KINDS["given_up"]:
                raise given_up(answer)
            if answer.kind == wire.REFUSED:
                raise RefusedError(
                    f"{self.name} refuses this worker: {validation.text(answer.note, validation.REASON, 'why')}"
                )
            if answer.kind != wire.WELCOME:
                raise MismatchError(f"{self.name} answers a hello with a frame of kind {answer.kind}")
            self._owner.welcome(answer)
        except BaseException:
            channel.close()
            raise
        return channel


def _check_server(channel: Channel) -> None:
    """Refuse a worker that poses as the control plane; rank 0 of a run without elastic launchers has one, too."""
    if channel.identity is not None and channel.identity.role == WORKER:
        raise MismatchError(refusal(channel.identity, CONTROL, "the control plane"))


def given_up(frame: Frame) -> GivenUpError:
    """The error that a "given_up" frame reports."""
    return (OverError if frame.numbers[1] else GivenUpError)(validation.text(frame.note, validation.REASON, "why"))


class Heartbeats:
    """The heartbeats, over a connection of their own.

    Args:
        where: the control plane is.
        hello: gives the worker's number and its secret.
        welcome: gets the answer to it.
        beat: gives its steps and its activity.
        beaten: called when one was answered.
        seconds: between two, and in which one must be answered.
    """

    def __init__(
        self,
        where: ControlAddress,
        hello: Callable[[], tuple[int, str]],
        welcome: Callable[[Frame], None],
        beat: Callable[[], tuple[int, str]],
        beaten: Callable[[], None],
        seconds: tuple[float, float],
    ) -> None:
        self._where, self._beat, self._beaten = where, beat, beaten
        self._hello, self._welcome = hello, welcome
        self._beat_s, self._silence_s = seconds
        self._closing = runtime.Event()
        self._now = runtime.Event()
        self._channel: Channel | None = None
        self._thread = runtime.thread(self._run, "paceline-heartbeat")
        self._thread.start()
        _HEARTBEATS.add(self)

    def prompt(self) -> None:
        """Send a heartbeat now."""
        self._now.set()

    def close(self) -> None:
        """Stop them."""
        self._closing.set()
        self._now.set()
        if self._channel is not None:
            self._channel.close()
        self._thread.join(5.0)

    def forget(self) -> None:
        """In a forked child: drop the connection."""
        if self._channel is not None:
            self._channel.abandon()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with self._where.connect(ATTEMPT_S) as self._channel:
                    _check_server(self._channel)
                    self._beat_until_closed(self._channel)
            except (PacelineError, OSError):  # the request connection reports the error
                self._closing.wait(self._beat_s)

    def _beat_until_closed(self, channel: Channel) -> None:
        worker, secret = self._hello()
        channel.limit = 0
        channel.send(wire.PULSE, (worker,), note=secret, deadline_s=self._silence_s)
        self._welcome(self._take(channel, wire.WELCOME))
        while not self._closing.is_set():
            step, doing = self._beat()
            channel.send(wire.BEAT, (step,), note=doing[:500], deadline_s=self._silence_s)
            self._take(channel, wire.BEATEN)
            self._beaten()
            self._now.wait(self._beat_s)
            self._now.clear()

    def _take(self, channel: Channel, kind: int) -> Frame:
        frame = channel.receive(deadline_s=self._silence_s)
        if frame.kind != kind:
            raise Closed(f"a heartbeat was answered with a frame of kind {frame.kind}")
        return frame


_HEARTBEATS: weakref.WeakSet[Heartbeats] = weakref.WeakSet()


def _after_fork() -> None:
    for connection in list(_CONNECTIONS):
        connection.forget()
    for heartbeats in list(_HEARTBEATS):
        heartbeats.forget()


os.register_at_fork(after_in_child=_after_fork)
