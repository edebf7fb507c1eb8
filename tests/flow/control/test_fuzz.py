# SPDX-License-Identifier: Apache-2.0
"""Nonsense from strangers and from workers ends the connection that it came over, and nothing else."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any

import pytest

from paceline.communication.sockets.channel import connect
from paceline.errors import PacelineError
from paceline.flow.control import server, wire
from paceline.flow.control.messages import Terms
from tests.flow.control.cluster import HERE, SOON, begin, control, member

TERMS = Terms(timeout_s=SOON)
ODD = [0, 1, 2, -1, 255, 1 << 31, 1 << 53, (1 << 63) - 1, -(1 << 63)]


def note(draw: random.Random, depth: int = 0) -> Any:
    """JSON of any shape, often with the words that the server knows."""
    kind = draw.randrange(9 if depth < 3 else 5)
    if kind < 5:
        return draw.choice([None, True, 1.5, "x" * draw.randrange(50), draw.choice(ODD), "left", "done", "holds", "\0"])
    if kind < 7:
        return [note(draw, depth + 1) for _ in range(draw.randrange(5))]
    words = ["marks", "facts", "secret", "host", "address", "port", "fingerprint", "why", "suspects"]
    return {draw.choice(words): note(draw, depth + 1) for _ in range(draw.randrange(5))}


def test_silent_connections_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_UNIDENTIFIED", 4)
    monkeypatch.setattr(server, "HELLO_S", SOON)
    with control(TERMS) as (control_plane, _), contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection((HERE, control_plane.port))) for _ in range(20)]
        one = member(control_plane.port)
        begin(one)
        assert socks[0].recv(1) == b"" and socks[10].recv(1) == b""
        one.close()


def test_a_secret_is_needed_to_be_a_worker_again() -> None:
    with control(TERMS) as (control_plane, _):
        one = member(control_plane.port)
        begin(one)
        for kind in (wire.BACK, wire.PULSE):
            with connect(HERE, control_plane.port, "server", SOON) as channel:
                channel.send(kind, (one.worker, 0, 0), note={"secret": "guess", "marks": []})
                if kind == wire.BACK:
                    answer = channel.receive(deadline_s=SOON)
                    assert answer.kind == wire.MESSAGE_KINDS["given_up"] and "another process" in answer.note
                with pytest.raises(PacelineError):
                    channel.receive(deadline_s=SOON)
        assert one.commit(1, 1, [], {}).committed
        one.close()
