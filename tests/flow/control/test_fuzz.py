# SPDX-License-Identifier: Apache-2.0
"""Nonsense from strangers and from workers ends the connection that it came over, and nothing else."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any

import pytest

from paceline.communication.sockets.channel import connect
from paceline.communication.sockets.frames import MAGIC, FrameHeader, write_note
from paceline.data.ledger.epoch_ledger import Question
from paceline.errors import GivenUpError, PacelineError
from paceline.flow.control import server, wire
from paceline.flow.control.messages import Terms
from paceline.flow.control.state_machine import REMEMBERED
from tests.flow.control.cluster import HERE, SOON, begin, control, member, together

TERMS = Terms(timeout_s=SOON)
FRAMES = 5000
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


def frame(draw: random.Random) -> bytes:
    """A frame that is whole, cut short, bent, or no frame at all."""
    kind = draw.choice([draw.randrange(16), draw.randrange(256)])
    text = write_note(note(draw))
    data = bytearray(FrameHeader.of(kind, [draw.choice(ODD) for _ in range(8)], text, None).pack() + text)
    bend = draw.randrange(6)
    if bend == 0:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif bend == 1:
        data = data[: draw.randrange(len(data))]
    elif bend == 2:
        data = bytearray(draw.randbytes(draw.randrange(200)))
    elif bend == 3:
        data[:8] = MAGIC[::-1]
    return bytes(data)


def test_nonsense_before_the_hello_costs_nothing() -> None:
    draw = random.Random(1)
    with control(TERMS) as (control_plane, log):
        one = member(control_plane.port)
        begin(one)
        for _ in range(FRAMES // 10):
            with contextlib.suppress(OSError), socket.create_connection((HERE, control_plane.port)) as sock:
                sock.sendall(b"".join(frame(draw) for _ in range(10)))
        assert one.commit(one.generation.number, 1, [], {}).committed
        log.wait("stranger")
        assert len(log.of("stranger")) + len(log.of("refused")) <= 40
        one.close()


def nonsense(port: int, draw: random.Random, count: int) -> int:
    """A worker that has said a good hello, and then nonsense; how many frames were taken."""
    about = {"host": "x", "address": HERE, "port": 1, "fingerprint": {"rule": "block"}}
    sent = 0
    while sent < count:
        with contextlib.suppress(PacelineError), connect(HERE, port, "server", SOON) as channel:
            channel.send(wire.HELLO, note=about)
            channel.receive(deadline_s=SOON)
            sent += 1
            for _ in range(20):
                kind, numbers = draw.randrange(4, 14), [draw.choice(ODD) for _ in range(8)]
                channel.send(kind, numbers, note=note(draw), deadline_s=SOON)
                sent += 1
    return sent


def test_invalid_frames_reach_no_other_worker() -> None:
    draw = random.Random(2)
    with control(TERMS) as (control_plane, _):
        one = member(control_plane.port)
        begin(one)
        assert one.commit(one.generation.number, 1, [], {}).committed  # newcomers wait for the next one
        assert one.ask(Question(0, 0, 10, 10)) == ("work", (0, 0, 0, 10))
        assert nonsense(control_plane.port, draw, FRAMES) >= FRAMES
        verdict = one.commit(one.generation.number, 2, [(0, 0, 0, 10)], {})
        assert verdict.committed and one.ask(Question(0, 0, 10)) == ("over", None)
        assert len(control_plane._machine.gone) <= REMEMBERED
        one.close()


def test_members_that_send_invalid_frames_are_lost_and_the_rest_continues() -> None:
    draw = random.Random(3)
    with control(Terms(timeout_s=SOON, min_workers=1)) as (control_plane, log):
        one = member(control_plane.port)
        begin(one)
        for _ in range(30):
            other = member(control_plane.port)
            generation = other.enter()
            with contextlib.suppress(PacelineError):
                for _ in range(30):
                    other._connection.send(draw.randrange(5, 12), tuple(draw.choice(ODD) for _ in range(8)), note(draw))
            other.close()
            log.wait("lost", worker=other.worker)
            if one.worker in one.generation.newcomers and one.generation.number > generation.number:
                one.holds_state(one.generation.number)
        newest = control_plane.status()["generation"]
        with one._changed:  # the last one's loss may be in the log before this worker hears of it
            assert one._changed.wait_for(lambda: one.generation.number == newest, SOON)
        generation = one.generation
        verdict = one.commit(generation.number, generation.exchange + 1, [], {})
        assert verdict.committed
        one.close()


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


def test_pushes_that_make_no_sense_end_a_worker_and_not_its_threads_only() -> None:
    """A server of another version: the worker hears of it where it waits."""
    with control(TERMS) as (control_plane, _):
        one = member(control_plane.port)
        begin(one)
        line = control_plane._connections[one.worker]
        line.send(200)
        with pytest.raises((PacelineError, GivenUpError)):
            together(lambda: one.commit(1, 7, [], {}))
        one.close()
