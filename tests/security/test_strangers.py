# SPDX-License-Identifier: Apache-2.0
"""Strangers at the doors of a run: they get nothing, and they stop nobody."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.communication.sockets import channel
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.channel import TLS, Late, Listener
from paceline.communication.sockets.frames import MAGIC
from tests.communication.connections import HERE, SOON
from tests.paths import python_path
from tests.security.doors import FRAMES
from tests.security.sockets import family, listening, loopback

MANY = 200
SHORT = 0.2
ELSEWHERE = "127.0.0.2"
"""Another host, as far as a listener can see."""

PROGRAM = """
    import json, os, time
    import torch
    import paceline
    from paceline.update.server import rendezvous
    from paceline.communication.sockets.channel import connect

    rank = os.environ["RANK"]

    opened = rendezvous.listen

    def told(*arguments):
        listener = opened(*arguments)
        with open(f"new-{rank}", "w") as file:
            json.dump([listener.address, listener.port], file)
        os.rename(f"new-{rank}", f"door-{rank}")
        return listener

    def later(*arguments):
        while not os.path.exists("go"):
            time.sleep(0.01)
        return connect(*arguments)

    rendezvous.listen, rendezvous.connect = told, later

    def train(rule):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = paceline.attach(model, optimizer, rule)
        for _ in range(20):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) ** 2).mean().backward()
            optimizer.step()
        return run, model

    other, _ = train("bmuf(period=4)")  # stays open: its sockets are seen beside the others
    run, model = train("asgd")
    run.close()
    other.close()
    with open(f"end-{rank}", "w") as file:
        json.dump(model.weight.tolist(), file)
"""


def given(sock: socket.socket) -> bytes:
    """All that the other end says until it closes."""
    sock.settimeout(SOON)
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            said += piece
    return said


def shake(port: int, context: ssl.SSLContext) -> bytes:
    """What is said to one with another certificate, or none: inside of TLS."""
    try:
        with socket.create_connection((HERE, port), timeout=SOON) as sock, context.wrap_socket(sock) as secure:
            secure.sendall(FRAMES[0])
            return given(secure)
    except OSError:
        return b""


def contexts(other: TLS) -> Iterator[ssl.SSLContext]:
    """A stranger's: a certificate of another authority, and none. It trusts everybody."""
    for certificate in (True, False):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate:
            context.load_cert_chain(other.certificate, other.key)
        yield context


@pytest.mark.slow  # records/2026-11-21_security
@pytest.mark.processes
def test_a_run_goes_on_whoever_knocks(tmp_path: Path) -> None:
    """While two workers wait for each other, strangers try all they can at both doors.

    All that the run listens at meanwhile, torch's store and groups included, nobody of another host can reach.
    """
    other = Authority.new().issue(tmp_path / "other", "stranger")
    here = tmp_path / "run"
    here.mkdir()
    lines = [line.removeprefix("    ") for line in PROGRAM.splitlines()]
    (here / "train.py").write_text("\n".join(lines), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--workers",
        "2",
        "--timeout",
        "120",
        "--log",
        "log",
        "train.py",
    ]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with (
        contextlib.ExitStack() as stack,
        subprocess.Popen(
            command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        stack.callback(process.kill)
        doors = [come(here / f"door-{rank}", process) for rank in range(2)]
        if Path("/proc/net/tcp").exists():
            found = listening(family(process.pid))
            assert set(doors) < found and [where for where in found if not loopback(where[0])] == []
        silent = []
        for _, port in doors:
            for context in contexts(other):
                assert shake(port, context) == b""
            for first in (b"GET / HTTP/1.1\r\n\r\n", FRAMES[0], b"\x16\x03\x01\x02\x00"):
                with socket.create_connection((HERE, port), timeout=SOON) as sock:
                    sock.sendall(first)
                    with contextlib.suppress(OSError):  # it is closed already
                        sock.shutdown(socket.SHUT_WR)
                    said = given(sock)
                    assert MAGIC not in said and len(said) < 64  # an alert of TLS at most
            silent += [stack.enter_context(socket.create_connection((HERE, port))) for _ in range(MANY)]
        for sock in silent[::2]:
            with contextlib.suppress(OSError):  # it was pushed out by those behind it
                sock.send(b"\x16")  # a handshake that begins, and never goes on
        (here / "go").touch()
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "was turned away" in errors
    ends = [json.loads((here / f"end-{rank}").read_text()) for rank in range(2)]
    assert ends[0] == ends[1]


def come(file: Path, process: subprocess.Popen[str]) -> tuple[str, int]:
    """What a worker has written, as soon as it has."""
    deadline = time.monotonic() + 100
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    address, port = json.loads(file.read_text())
    return str(address), int(port)


def test_strangers_do_not_push_out_a_worker_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose handshake takes its time finds its place kept, with ever more strangers behind it."""
    monkeypatch.setattr(channel, "HANDSHAKE_S", SOON)  # it is never too late here
    tls = Authority.new().issue(tmp_path / "worker", "worker")
    with contextlib.ExitStack() as stack, Listener(HERE, tls) as listener:
        slow = stack.enter_context(socket.create_connection((HERE, listener.port), timeout=SOON))
        with pytest.raises(Late):
            listener.accept(0.0)
        for _ in range(4):
            for _ in range(MANY // 4):
                stack.enter_context(socket.create_connection((HERE, listener.port), source_address=(ELSEWHERE, 0)))
            with pytest.raises(Late):
                listener.accept(SHORT)
        assert any(peer.startswith(f"{HERE}:{slow.getsockname()[1]}") for peer, _ in listener._handshaking.values())


def test_who_is_turned_away_is_written_down(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Every one, with its address and the reason."""
    tls = Authority.new().issue(tmp_path / "worker", "worker")
    caplog.set_level("INFO", "paceline.doors")
    with Listener(HERE, tls) as listener:
        for _ in range(3):
            with socket.create_connection((HERE, listener.port)) as sock:
                name = "{}:{}".format(*sock.getsockname())
                sock.sendall(b"plain text, and enough of it for a record")
                with pytest.raises(Late):
                    listener.accept(SHORT)
            assert f"a connection from {name} was turned away: " in caplog.text
    said = [record for record in caplog.records if record.name == "paceline.doors"]
    assert len(said) == 3 and sum(record.levelname == "WARNING" for record in said) <= 1
