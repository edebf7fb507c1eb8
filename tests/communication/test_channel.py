# SPDX-License-Identifier: Apache-2.0
"""Connections are made at one address, tried again, and end with the process at the other end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paceline.communication.sockets.channel import Channel, Closed, FrameHeader, Late, Listener, connect
from paceline.errors import UnsupportedError
from tests.communication.connections import HERE, SOON

SHORT = 0.2
"""Seconds of a wait that is meant to be in vain."""

PEER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    sock.sendall(bytes.fromhex(sys.argv[3]))
    sys.stdin.read()
"""
"""Another process, which says what it is told to and then nothing more."""


@contextlib.contextmanager
def peer(listener: Listener, program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Channel]]:
    """A process that runs `program`, and the channel to it."""
    command = [sys.executable, "-c", program, HERE, str(listener.port), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            with listener.accept(2 * SOON) as channel:
                yield process, channel
        finally:
            process.kill()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(HERE) as listener:
        yield listener


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port that is taken, and where no process listens."""
    with socket.socket() as sock:
        sock.bind((HERE, 0))
        yield sock


@pytest.mark.processes
def test_a_peer_killed_in_the_middle_of_a_body(listener: Listener) -> None:
    half = FrameHeader.of(1, (), b"", torch.zeros(4)).pack() + bytes(8)
    with peer(listener, PEER, half.hex()) as (process, channel):
        channel.peer = "rank 2 on lion"

        def kill(header: FrameHeader) -> torch.Tensor:
            process.kill()
            return torch.zeros(header.numel)

        with pytest.raises(Closed, match="rank 2 on lion"):
            channel.receive(kill)
        assert channel.closed


@pytest.mark.processes
def test_a_peer_that_is_stopped(listener: Listener) -> None:
    """A process that hangs keeps its connection: only the deadline tells."""
    with peer(listener, PEER, "00") as (process, channel):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Late, match="did not take what was sent in time"):
            channel.send(1, body=torch.zeros(1 << 24), deadline_s=SHORT)
        assert channel.closed


def test_a_listener_has_one_address_only(listener: Listener) -> None:
    """127.0.0.2 is this host too, but not the address that was given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))  # the address exists
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.port))
    socket.create_connection((HERE, listener.port)).close()


@pytest.mark.parametrize("address", ["0.0.0.0", "", "::"])
def test_a_listener_for_every_address_is_refused(address: str) -> None:
    with pytest.raises(UnsupportedError, match="takes one address of this host, got"):
        Listener(address)


def test_closing_a_listener_ends_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    listener = Listener(HERE)
    wait = listener._wait

    def tell(until: float) -> None:
        waiting.set()
        wait(until)

    monkeypatch.setattr(listener, "_wait", tell)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(listener.accept, 10 * SOON)
        assert waiting.wait(SOON)
        listener.close()
        assert isinstance(coming.exception(SOON), Closed)
    with pytest.raises(Closed, match="is closed"):
        listener.accept(SOON)
    listener.close()


def test_an_early_client_tries_again(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            silent.listen()

    monkeypatch.setattr(time, "sleep", pause)
    with connect(HERE, silent.getsockname()[1], "server", SOON):
        assert len(pauses) == 3


def test_a_connection_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ends of one socket: the kernel allows it where the port that is called is given out to the caller."""

    def dial(*_: object, **__: object) -> socket.socket:
        sock = socket.socket()
        sock.bind((HERE, 0))
        sock.connect(sock.getsockname())
        return sock

    monkeypatch.setattr(socket, "create_connection", dial)
    with pytest.raises(Late, match="no process listens there"):
        connect(HERE, 1, "rank 0", SHORT)


def test_a_connection_that_is_reset_at_once_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def reset(*_: object, **settings: object) -> socket.socket:
        made.append(socket.socket())  # which has no peer any more
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", reset)
    with pytest.raises(Late, match="cannot be reached within"):
        connect("127.0.0.1", 1, "rank 0", timeout_s=0.05)
    assert made and all(one.fileno() == -1 for one in made)
