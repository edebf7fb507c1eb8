# SPDX-License-Identifier: Apache-2.0
"""Every place where bytes from elsewhere arrive, opened in this process for the tests to knock at.

A further listener is one more line of `DOORS`: a function that opens it and gives an `Opened`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.communication.ring import RingListener, RingTransport
from paceline.communication.ring.wire import HELLO as ring_hello
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.channel import TLS, Channel, Closed, Late, Listener, connect
from paceline.communication.sockets.frames import FrameHeader, memory, write_note
from paceline.communication.sockets.rejected import turned_away
from paceline.core.world import World
from paceline.errors import PacelineError
from paceline.flow.control import wire
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Terms
from paceline.flow.control.server import ControlServer
from paceline.update.server.protocol import FrameKind
from paceline.update.server.rendezvous import _Acceptor
from paceline_plugins.sites.relay.enrolment import Registrar
from paceline_plugins.sites.relay.invitation import Invitation
from paceline_plugins.sites.relay.member import RelayMember
from paceline_plugins.sites.relay.protocol import ENROL, MEMBER, STREAM, member_name, prelude
from paceline_plugins.sites.relay.server import RelayServer
from tests.communication.connections import HERE, SOON

LIMIT = 1 << 20
"""Bytes of a body that the bare listener takes."""


@dataclass(frozen=True)
class Opened:
    """A door that is open.

    Attributes:
        port: at 127.0.0.1.
        real: what its visitors really send; frames, or a handshake.
        serves: raises unless a rightful visitor is still served.
        inside: certificates of a worker of the job, where what is sent goes inside TLS.
    """

    port: int
    real: list[bytes]
    serves: Callable[[], None]
    inside: TLS | None = None


def frame(kind: int, numbers: tuple[int, ...] = (), note: object = None, body: torch.Tensor | None = None) -> bytes:
    """A frame as it goes over the wire."""
    text = write_note(note)
    data = FrameHeader.of(kind, numbers, text, body).pack() + text
    return data if body is None else data + memory(body).tobytes()


FRAMES = [
    frame(FrameKind.HELLO, (1,), "0123456789abcdef" * 2),
    frame(FrameKind.SETTINGS, (0,), {"lr": 0.1, "betas": [0.9, 0.999], "foreach": None}),
    frame(FrameKind.PUSH, (3, 17, 16, 1, 99, 0, 1), [[0, 1, 0, 64]], torch.linspace(-1, 1, 64)),
    frame(FrameKind.ANSWER, (3, 18, 1, 99), None, torch.arange(16)),
    frame(FrameKind.LEASE, (1, 2, 3)),
    frame(9, (-1, 1 << 62), {"deep": [[[[[]]]]], "text": "\u00e4\ud800"}, torch.zeros(5, dtype=torch.uint8)),
]
"""Frames as workers send them."""


@contextlib.contextmanager
def bare(tls: TLS | None = None) -> Iterator[Opened]:
    """A listener, and what everybody does with it: take a connection, and receive frames until one is none."""

    def serve(channel: Channel) -> None:
        channel.limit = LIMIT
        try:
            while True:
                got = channel.receive(deadline_s=SOON)
                if got.note == "hello":
                    channel.send(1, note="welcome")
        except PacelineError as error:
            channel.close()
            turned_away(channel.peer, error)

    def accept(listener: Listener) -> None:
        with contextlib.suppress(Closed):
            while True:
                with contextlib.suppress(Late):
                    channel = listener.accept(1.0)
                    threading.Thread(target=serve, args=(channel,), daemon=True).start()

    def serves() -> None:
        with connect(HERE, listener.port, "the door", SOON, tls) as channel:
            channel.send(1, note="hello")
            assert channel.receive(deadline_s=SOON).note == "welcome"

    with Listener(HERE, tls) as listener:
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        yield Opened(listener.port, FRAMES, serves, tls)
        listener.close()
        thread.join()


@contextlib.contextmanager
def worker() -> Iterator[TLS]:
    """A worker's certificates, of an authority that nobody else has."""
    with tempfile.TemporaryDirectory() as folder:
        yield Authority.new().issue(Path(folder) / "worker", "worker")


@contextlib.contextmanager
def handshake() -> Iterator[Opened]:
    """A listener with TLS, to which anything is said but a handshake that is good."""
    with worker() as tls, bare(tls) as opened:
        yield Opened(opened.port, [client_hello(tls), *FRAMES[:1]], opened.serves)


@contextlib.contextmanager
def within_tls() -> Iterator[Opened]:
    """The same listener, and a visitor who has a certificate of the job."""
    with worker() as tls, bare(tls) as opened:
        yield opened


@contextlib.contextmanager
def meeting() -> Iterator[Opened]:
    """Where workers of asynchronous rules meet, in the clear: who does not know the token is sent away."""
    token, size = "f" * 32, 10_000
    with Listener(HERE) as listener:
        door = _Acceptor(listener, World(0, size), token)
        ranks = iter(range(1, size))

        def serves() -> None:
            rank = next(ranks)
            with connect(HERE, listener.port, "the door", SOON) as channel:
                channel.send(FrameKind.HELLO, (rank,), note=token)
                with door._changed:
                    assert door._changed.wait_for(lambda: rank in door.incoming, SOON)

        yield Opened(listener.port, FRAMES, serves)
        for channel in door.close():
            channel.close()


@contextlib.contextmanager
def control() -> Iterator[Opened]:
    """The control plane of an elastic run, in the clear."""
    about = About("host", HERE, 1, {"rule": "bmuf"})
    plane = ControlServer(HERE, 0, None, Terms(max_workers=100_000), None)
    plane.start()
    member = ControlClient(HERE, plane.port, about, None, SOON)  # with whom visitors have too little in common

    def serves() -> None:
        assert plane.status()["exchange"] == 0
        ControlClient(HERE, plane.port, about, None, SOON).close()

    real = [
        frame(wire.HELLO, (), About("host", HERE, 1, {"rule": "diloco"}).note()),
        frame(wire.BACK, (0, 0, 0), {"secret": "f" * 32, "marks": [[0, 0, 0, 4]]}),
        frame(wire.PULSE, (0,), "f" * 32),
        frame(wire.COMMIT, (1, 1, 1), {"marks": [[0, 0, 0, 4]], "facts": {}, "returned": []}),
    ]
    try:
        yield Opened(plane.port, real, serves)
    finally:
        member.close()
        plane.close()


@contextlib.contextmanager
def ring() -> Iterator[Opened]:
    """A worker's door for rings, in the clear."""
    door = RingListener(HERE)
    numbers = iter(range(1_000_000))
    awaiting = RingTransport(door, "generation 1", World(0, 2), [(HERE, door.port), (HERE, 1)], SOON)

    def serves() -> None:
        label, other = f"fuzzed {next(numbers)}", RingListener(HERE)
        both = [(HERE, door.port), (HERE, other.port)]
        ends = [RingTransport(one, label, World(rank, 2), both, SOON) for rank, one in enumerate((door, other))]
        waits = [end.all_reduce(torch.ones(3)) for end in ends]
        for wait in waits:
            wait.wait()
        for end in ends:
            end.close()
        other.close()

    try:
        yield Opened(door.port, [frame(ring_hello, (-1, 1), "generation 1"), *FRAMES[:3]], serves)
    finally:
        awaiting.close()
        door.close()


@contextlib.contextmanager
def relay() -> Iterator[Opened]:
    """The relay of an elastic run over several sites, with an invitation to it."""
    authority = Authority.new()
    with tempfile.TemporaryDirectory() as folder:
        own, mine = (authority.issue(Path(folder) / role, role, role) for role in ("control", "worker"))
        invited = Invitation(HERE, 1, authority.fingerprint())
        with RelayServer(HERE, 0, own, Registrar(authority, [invited])) as server, Listener(HERE, mine) as listener:

            def serves() -> None:
                name = member_name(mine.identity.id, os.urandom(4).hex())
                member = RelayMember((HERE, server.port), name, mine, listener.adopt, SOON)
                with ThreadPoolExecutor(1) as pool:
                    coming = pool.submit(listener.accept, SOON)
                    with member.connect(name, "the door", SOON) as near, coming.result() as far:
                        near.send(1, note="hello")
                        assert far.receive(deadline_s=SOON).note == "hello"
                member.close()

            request = (100).to_bytes(4, "big") + b'{"host": "here", "keys": []}'
            real = [
                prelude(MEMBER) + client_hello(mine),
                prelude(STREAM, bytes(range(32))) + FRAMES[0],
                prelude(ENROL, invited.name) + request + bytes(104),
            ]
            yield Opened(server.port, real, serves)


def client_hello(tls: TLS) -> bytes:
    """The first message of a handshake."""
    outgoing = ssl.MemoryBIO()
    handshake = tls.client().wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


DOORS: dict[str, Callable[[], AbstractContextManager[Opened]]] = {
    "listener": bare,
    "handshake": handshake,
    "within_tls": within_tls,
    "meeting": meeting,
    "control": control,
    "ring": ring,
    "relay": relay,
}


def knock(opened: Opened) -> socket.socket:
    """A connection to the door: inside TLS where it has to be."""
    sock = socket.create_connection((HERE, opened.port), timeout=SOON)
    if opened.inside is None:
        return sock
    try:
        return _client(opened.inside).wrap_socket(sock)
    except OSError:
        sock.close()
        raise


@functools.cache
def _client(tls: TLS) -> ssl.SSLContext:
    """Made once: it reads three files."""
    return tls.client()
