# SPDX-License-Identifier: Apache-2.0
"""Who may come in, who waits, and who is sent away without a disturbance for the others."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.communication.ring import RingListener, RingTransport
from paceline.communication.ring import listener as listener_module
from paceline.communication.ring.wire import HELLO
from paceline.communication.sockets.channel import Channel, Closed, connect
from paceline.errors import PeerLostError, UnsupportedError
from tests.communication.connections import HERE, SOON
from tests.communication.ring.rings import everywhere, listeners, ring, world_of
from tests.communication.test_tls import Authority


def hello(listener: RingListener, label: Any, rank: int, kind: int = HELLO) -> Channel:
    channel = connect(HERE, listener.port, "listener", SOON)
    channel.send(kind, (rank, 1000 * int(SOON)), None, label)
    return channel


def waiting(listener: RingListener, label: str) -> Channel:
    """A connection that waits for a label; each is heard in a thread of its own, so they may overtake each other."""
    channel, end = hello(listener, label, 1), time.monotonic() + SOON
    while (label, 1) not in listener._waiting:
        assert time.monotonic() < end, f"the label {label} has not arrived"
        time.sleep(0.01)
    return channel


def is_closed(channel: Channel) -> bool:
    """Whether the other end closes it; nothing else ever comes."""
    with channel, pytest.raises(Closed):
        channel.receive(deadline_s=SOON)
    return True


def test_a_label_that_is_not_known_yet_waits() -> None:
    """All connect before the last one has begun."""
    with listeners(3) as opened:
        places = [(listener.address, listener.port) for listener in opened]
        early = [RingTransport(opened[k], "job/2", world_of(k, 3), places, SOON) for k in (2, 1)]
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(one.barrier) for one in early]
            late = RingTransport(opened[0], "job/2", world_of(0, 3), places, SOON)
            late.barrier()
            for one in waiting:
                one.result()
        for one in (*early, late):
            one.close()


def test_one_listener_for_one_set_of_members_after_another() -> None:
    with listeners(3) as opened:
        for generation, ranks in enumerate([(0, 1, 2), (0, 2), (0, 1, 2)]):
            places = [(opened[k].address, opened[k].port) for k in ranks]
            members = [
                RingTransport(opened[k], f"job/{generation}", world_of(rank, len(ranks)), places, SOON)
                for rank, k in enumerate(ranks)
            ]
            assert everywhere(members, lambda t: t.gather_json(t.world.rank)) == [list(range(len(ranks)))] * len(ranks)
            for one in members:
                one.close()
        with pytest.raises(ValueError, match="the label 'job/0' was used before"):
            opened[0].register("job/0", lambda rank, channel: True)
        assert is_closed(hello(opened[0], "job/0", 1))


@pytest.mark.parametrize("rank", [0, 1, 3, 99])
def test_ranks_that_are_not_awaited(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """This one itself, one that dials himself, one that is there already, and one that there is not."""
    with listeners(4) as opened, caplog.at_level(logging.INFO, "paceline.doors"):
        places = [(listener.address, listener.port) for listener in opened]
        members = [RingTransport(listener, "job/1", world_of(k, 4), places, SOON) for k, listener in enumerate(opened)]
        everywhere(members, lambda t: t.barrier())
        assert is_closed(hello(opened[1], "job/1", rank))
        assert everywhere(members, lambda t: t.barrier()) == [None] * 4
        for one in members:
            one.close()
    assert f"comes for 'job/1' as rank {rank}, which is not awaited there" in caplog.text


@pytest.mark.parametrize(
    ("label", "rank", "kind"), [(7, 1, HELLO), ("x" * 201, 1, HELLO), ("a", -1, HELLO), ("a", 1, 9)]
)
def test_invalid_hellos(label: Any, rank: int, kind: int, caplog: pytest.LogCaptureFixture) -> None:
    with listeners(1) as (listener,), caplog.at_level(logging.INFO, "paceline.doors"):
        assert is_closed(hello(listener, label, rank, kind))
    assert "it does not say for whom it is" in caplog.text


def test_invalid_connections_do_not_disturb_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, and ones that talk nonsense, before and while the members meet."""
    monkeypatch.setattr(listener_module, "MOST_WITHOUT_HELLO", 4)
    with ring(2) as members, contextlib.ExitStack() as stack:
        listener = members[0]._connections._listener
        strangers = []
        for k in range(20):
            sock = stack.enter_context(socket.create_connection((HERE, listener.port)))
            with contextlib.suppress(OSError):
                sock.sendall([b"", b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(200), b"paceline" + bytes(100)][k % 4])
            strangers.append(sock)
        assert everywhere(members, lambda t: t.gather_json(t.world.rank)) == [[0, 1]] * 2
        strangers[1].settimeout(SOON)
        with contextlib.suppress(ConnectionError):
            assert strangers[1].recv(1) == b""


def test_waiting_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MOST_WAITING", 2)
    with listeners(1) as (listener,), contextlib.ExitStack() as stack:
        first = waiting(listener, "a")
        for label in ("b", "c"):
            stack.enter_context(waiting(listener, label))
        assert is_closed(first)
        assert is_closed(hello(listener, "c", 1))


def test_a_connection_that_waits_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "PATIENCE_S", 0.0)
    with listeners(1) as (listener,):
        assert is_closed(hello(listener, "nobody's", 1))


def test_without_the_job_s_certificate(tmp_path: Path) -> None:
    job, other = Authority(tmp_path, "job"), Authority(tmp_path, "other")
    with listeners(2, [job.worker("a"), other.worker("b")]) as opened:
        places = [(listener.address, listener.port) for listener in opened]
        stranger = RingTransport(opened[1], "job/1", world_of(1, 2), places, SOON)
        with pytest.raises(PeerLostError, match="its certificate is not of this job's authority"):
            stranger.barrier()
        stranger.close()


def test_addresses_and_labels_that_are_none() -> None:
    with listeners(1) as (listener,):
        with pytest.raises(UnsupportedError, match="one address for each of 2 workers, got 1"):
            RingTransport(listener, "job", world_of(0, 2), [(HERE, 1)], SOON)
        with pytest.raises(UnsupportedError, match="a label of 1 to 200 characters"):
            RingTransport(listener, "x" * 201, world_of(0, 1), [(HERE, 1)], SOON)
    with pytest.raises(UnsupportedError, match="cannot listen at"):
        RingListener("192.0.2.1")
    assert torch.tensor(listener.port) > 0
