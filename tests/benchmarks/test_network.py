# SPDX-License-Identifier: Apache-2.0
"""The emulated network: rates, bytes, delays, cables that are pulled, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from devtools.emulation import PREFIX, EmulatedNetwork, sweep

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]

needs_root = pytest.mark.skipif(bool(EmulatedNetwork.possible()), reason=EmulatedNetwork.possible())

# One end of a conversation: answers pings of one byte, then says how long the rest took to arrive.
SERVER = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while peer.recv(1) == b"p":
    peer.send(b"p")
began, got, room = time.monotonic(), 0, bytearray(1 << 20)
while True:
    count = peer.recv_into(room)
    if not count:
        break
    got += count
print(got, time.monotonic() - began, flush=True)
"""
# The other end: the fastest of some round trips, then so many bytes.
CLIENT = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), timeout=20)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(20):
    began = time.monotonic()
    peer.send(b"p")
    peer.recv(1)
    trips.append(time.monotonic() - began)
peer.send(b"q")
peer.sendall(bytes(int(sys.argv[2])))
peer.close()
print(min(trips), flush=True)
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=0.5)
    print("yes")
except ConnectionRefusedError:
    print("yes")
except OSError:
    print("no")
"""

# Datagrams that arrive here, one after another; "end" comes over a link that loses nothing any more.
COUNTER = """
import socket
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
here.bind(("0.0.0.0", 5001))
here.settimeout(20)
print("ready", flush=True)
got = 0
while here.recv(100) != b"end":
    got += 1
print(got, flush=True)
"""
SENDER = """
import socket, sys
there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
there.connect((sys.argv[1], 5001))
for _ in range(int(sys.argv[2])):
    there.send(b"one")
"""
FAREWELL = SENDER.replace('b"one"', 'b"end"')


def python(network: EmulatedNetwork, host: int, program: str, *arguments: object) -> list[str]:
    return [*network.prefix(host), sys.executable, "-c", program, *map(str, arguments)]


def talk(network: EmulatedNetwork, server: int, client: int, count: int) -> tuple[float, float]:
    """Bytes a second from `client` to `server`, and the fastest round trip in seconds."""
    listening = subprocess.Popen(python(network, server, SERVER), stdout=subprocess.PIPE, text=True)
    try:
        assert listening.stdout is not None
        assert listening.stdout.readline() == "ready\n"
        command = python(network, client, CLIENT, network.name(server), count)
        trip = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
        said, _ = listening.communicate(timeout=DEADLINE_S)
    finally:
        listening.kill()
        listening.wait()
    got, seconds = said.split()
    assert int(got) == count
    return count / float(seconds), float(trip)


def arrive(network: EmulatedNetwork, source: int, target: int, count: int, share: float) -> int:
    """How many of `count` datagrams arrive while host 1's link loses a share."""
    counting = subprocess.Popen(python(network, target, COUNTER), stdout=subprocess.PIPE, text=True)
    try:
        assert counting.stdout is not None
        assert counting.stdout.readline() == "ready\n"
        network.lose(1, share)
        subprocess.run(python(network, source, SENDER, network.address(target), count), timeout=DEADLINE_S, check=True)
        network.lose(1, 0.0)
        subprocess.run(python(network, source, FAREWELL, network.address(target), 1), timeout=DEADLINE_S, check=True)
        said, _ = counting.communicate(timeout=DEADLINE_S)
    finally:
        counting.kill()
        counting.wait()
    return int(said)


def reaches(network: EmulatedNetwork, source: int, target: int) -> bool:
    command = python(network, source, REACH, network.address(target))
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout == "yes\n"


def left() -> list[str]:
    """What of our networks is on this machine."""
    return [p.name for place in ("/run/netns", "/etc/netns") for p in Path(place).glob(f"{PREFIX}-{os.getpid()}-*")]


@pytest.mark.slow
@needs_root
@pytest.mark.network
@pytest.mark.processes
def test_rate_and_bytes_in_both_directions() -> None:
    with EmulatedNetwork(hosts=2, rate_mbit=[80, 200]) as network:
        for server, client in ((0, 1), (1, 0)):
            before = network.sent_bytes(client)
            rate, _ = talk(network, server, client, 8_000_000)
            assert 8 * rate / 1e6 == pytest.approx(80, rel=0.15)  # the slower of the two ends
            assert 8_000_000 <= network.sent_bytes(client) - before < 8_800_000
        network.slow(0, 160)
        rate, _ = talk(network, 0, 1, 16_000_000)
        assert 8 * rate / 1e6 == pytest.approx(160, rel=0.15)


@needs_root
@pytest.mark.network
@pytest.mark.processes
def test_a_cable_can_be_pulled_and_plugged_in_again() -> None:
    with EmulatedNetwork(hosts=3) as network:
        assert reaches(network, 0, 1)
        network.cut(1)
        assert not reaches(network, 0, 1)
        assert reaches(network, 0, 2)
        network.mend(1)
        assert reaches(network, 0, 1)


@pytest.mark.slow
@needs_root
@pytest.mark.network
@pytest.mark.processes
def test_a_link_loses_packets_in_both_directions_and_no_other_link_does() -> None:
    with EmulatedNetwork(hosts=3) as network:
        assert reaches(network, 0, 1)
        count = 2000
        for source, target in ((0, 1), (1, 0)):
            assert arrive(network, source, target, count, 0.25) == pytest.approx(
                0.75 * count, abs=5 * (count / 5) ** 0.5
            )
        assert arrive(network, 0, 2, count, 0.25) == count
        network.lose(1, 1.0)
        assert not reaches(network, 0, 1)
        assert reaches(network, 0, 2)
        network.lose(2, 0.1)
        network.lose(1, 0.0)
        assert network.losses == [0.0, 0.0, 0.1]
        assert reaches(network, 0, 1)
        network.lose(1, 0.1)
        talk(network, 0, 1, 1_000_000)


@pytest.mark.processes
@needs_root
@pytest.mark.network
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception(error: type[BaseException]) -> None:
    with pytest.raises(error):
        with EmulatedNetwork(hosts=2, delay_ms=1) as network:
            inside = subprocess.Popen([*network.prefix(1), "sleep", "600"])
            assert left()
            raise error
    assert left() == []
    assert inside.wait(DEADLINE_S) == -signal.SIGKILL


@needs_root
@pytest.mark.network
@pytest.mark.processes
def test_the_next_network_removes_what_a_killed_process_left() -> None:
    program = """
        from devtools.emulation import EmulatedNetwork
        with EmulatedNetwork(hosts=2, delay_ms=1):
            print("up", flush=True)
            input()
    """
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    assert maker.stdout.readline() == "up\n"
    maker.kill()
    maker.communicate()
    pattern = f"{PREFIX}-{maker.pid}-*"
    assert len(list(Path("/run/netns").glob(pattern))) == 3
    assert len([name for name in sweep() if name.startswith(f"{PREFIX}-{maker.pid}-")]) >= 3
    assert list(Path("/run/netns").glob(pattern)) == list(Path("/etc/netns").glob(pattern)) == []
