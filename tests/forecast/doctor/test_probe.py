# SPDX-License-Identifier: Apache-2.0
"""The doctor's conversation, and who measures what."""

from __future__ import annotations

import socket
import struct

import pytest

from paceline_plugins.forecast.doctor.machine import examine, gloo_address
from paceline_plugins.forecast.doctor.probe import bandwidth_pairs, coordinates_from
from paceline_plugins.forecast.doctor.wire import MOST_BYTES, Server, connect, measure_bandwidth, ping, receive

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_a_server_answers_pings_and_swallows_transfers() -> None:
    server = Server(3, "token")
    peer = connect("127.0.0.1", server.port, 3, "token", 5.0)
    trip, clock = ping(peer)
    assert 0 < trip < 5
    assert abs(clock) < 1
    assert measure_bandwidth(peer, 0.05) > 0
    assert ping(peer)[0] > 0  # and goes on
    peer.close()
    server.close()


def test_a_stranger_and_a_wrong_worker_are_refused() -> None:
    server = Server(3, "token")
    with pytest.raises(ConnectionError, match="closed"):
        connect("127.0.0.1", server.port, 3, "another", 5.0)
    with pytest.raises(ConnectionError, match="rank 3 answers there"):
        connect("127.0.0.1", server.port, 2, "token", 5.0)
    server.close()


@pytest.mark.parametrize(
    "sent", [struct.pack(">I", MOST_BYTES + 1), struct.pack(">I", 3) + b"{{{", struct.pack(">I", 2) + b"[]"]
)
def test_what_is_not_a_message_is_refused(sent: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(sent)
        right.settimeout(5)
        with pytest.raises(ConnectionError):
            receive(right)


def test_a_silent_peer_does_not_hold_anybody_up() -> None:
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(0.05)
        with pytest.raises(TimeoutError):
            receive(right)


def test_every_pair_is_measured_where_each_host_has_one_worker_or_all_share_one() -> None:
    every = {(a, b) for a in range(3) for b in range(3) if a != b}
    assert bandwidth_pairs({0: "a", 1: "b", 2: "c"}) == every
    assert bandwidth_pairs({0: "a", 1: "a", 2: "a"}) == every


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "4"}, "RANK must lie in 0..WORLD_SIZE-1"),
        ({"RANK": "one"}, "RANK must be a number, got 'one'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT must be a number"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        coordinates_from(LAUNCHED | changed)


def test_where_gloo_listens() -> None:
    found = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    assert gloo_address("", found, ["127.0.1.1"]) == "127.0.1.1"
    assert gloo_address("eth0", found, ["127.0.1.1"]) == "10.0.0.1"
    assert gloo_address("eth9", found, ["127.0.1.1"]) == ""
    assert gloo_address("", found, []) == ""


def test_this_machine_can_be_examined() -> None:
    machine = examine(0)
    assert machine.interfaces.get("lo", "127.0.0.1") == "127.0.0.1"
    assert machine.cores >= 1
    assert set(machine.versions) == {"python", "torch", "numpy", "paceline", "system"}
