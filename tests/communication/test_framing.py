# SPDX-License-Identifier: Apache-2.0
"""Frames over one connection: what arrives, what is refused, and what ends a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.communication.sockets.frames import DTYPES, HEADER_BYTES, NOTE_LIMIT, Closed, FrameHeader, Late
from paceline.communication.sockets.framing import Channel
from paceline.errors import MismatchError, PeerLostError
from tests.communication.connections import SOON, both, pair, stranger

SHORT = 0.2
"""Seconds of a wait that is meant to be in vain."""
HUGE = 1 << 24
"""Elements that no pair of socket buffers takes: 64 MiB."""


def lost(call: Callable[[], Any]) -> BaseException:
    """The error with which `call` ends."""
    with pytest.raises((PeerLostError, MismatchError)) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_body_of_every_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(12).to(dtype).reshape(3, 4)
    with pair() as (near, far):
        near.send(9, (1, -5), x, {"worker": 3})
        frame = far.receive(deadline_s=SOON)
    assert (frame.kind, frame.numbers, frame.note) == (9, (1, -5, 0, 0, 0, 0, 0, 0), {"worker": 3})
    assert frame.body is not None
    assert frame.body.dtype == dtype
    assert frame.body.equal(x.flatten())


def test_into_a_buffer_and_into_what_the_header_asks_for() -> None:
    buffer, headers = torch.zeros(2, 3), []

    def choose(header: FrameHeader) -> Tensor:
        headers.append(header)
        return buffer[header.numbers[0]]

    with pair() as (near, far):
        near.send(1, body=torch.arange(6.0))
        near.send(2, (1,), torch.full((3,), 7.0))
        assert far.receive(buffer, SOON).body is buffer
        assert buffer.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        second = far.receive(choose, SOON)
    assert buffer.tolist() == [[0.0, 1.0, 2.0], [7.0, 7.0, 7.0]]
    assert second.body is not None
    assert second.body.data_ptr() == buffer[1].data_ptr()
    assert [(h.kind, h.numel, h.dtype) for h in headers] == [(2, 3, torch.float32)]


def test_bytes_are_counted_at_both_ends() -> None:
    with pair() as (near, far):
        near.send(1, body=torch.zeros(10))
        near.send(1, note=[1])
        for _ in range(2):
            far.receive(deadline_s=SOON)
        assert near.bytes_sent == far.bytes_received == 2 * HEADER_BYTES + 40 + 3
        assert near.bytes_received == far.bytes_sent == 0


def test_both_ends_send_more_than_the_network_takes() -> None:
    """Each sends and receives 64 MiB at once: with one thread for both it would never end."""

    def talk(channel: Channel, value: float) -> float:
        out = torch.full((HUGE,), value)
        sender = threading.Thread(target=lambda: channel.send(1, body=out, deadline_s=SOON))
        sender.start()
        body = channel.receive(deadline_s=SOON).body
        sender.join()
        assert body is not None
        return body.sum().item() / HUGE

    with pair() as (near, far):
        assert both(lambda: talk(near, 2.0), lambda: talk(far, 4.0)) == [4.0, 2.0]


def test_frames_that_are_sent_together_arrive_one_by_one() -> None:
    bodies: list[Tensor | None] = [torch.arange(float(n)) for n in (HUGE // 8, 0, 3, 1)]
    bodies[2:2] = [None, torch.tensor(7.0, requires_grad=True), torch.ones(5, dtype=torch.bfloat16)]
    with pair() as (near, far):
        frames = [(k, (k,), body, {"k": k} if k % 2 else None) for k, body in enumerate(bodies)]
        found = both(lambda: near.send_all(frames, SOON), lambda: [far.receive(deadline_s=SOON) for _ in frames])[1]
        assert near.bytes_sent == far.bytes_received
    for k, (frame, body) in enumerate(zip(found, bodies, strict=True)):
        assert (frame.kind, frame.numbers[0], frame.note) == (k, k, {"k": k} if k % 2 else None)
        assert frame.body is None if body is None else frame.body.equal(body.detach().flatten())


def test_a_wake_up_is_never_lost() -> None:
    with pair() as (_, far):
        waker = far.waker()
        for _ in range(3):
            for _ in range(5000):  # more than its socket holds
                waker.wake()
            assert not far.wait(waker, time.monotonic() + SOON)
            waker.clear()
            assert not far.wait(waker, time.monotonic())
        waker.close()


def test_two_threads_do_not_mix_their_frames() -> None:
    def send(channel: Channel, value: int) -> None:
        for k in range(20):
            channel.send(value, (k,), torch.full((300_000,), float(value)), deadline_s=SOON)

    def receive(channel: Channel) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(40):
            frame = channel.receive(deadline_s=SOON)
            assert frame.body is not None
            assert bool((frame.body == frame.kind).all())
            found[frame.kind].append(frame.numbers[0])
        return found

    with pair() as (near, far):
        found = both(lambda: send(near, 1), lambda: send(near, 2), lambda: receive(far))[2]
    assert found == {1: list(range(20)), 2: list(range(20))}


def test_an_invalid_frame_leaves_the_channel_open() -> None:
    with pair() as (near, far):
        for body, note in (
            (torch.zeros(2, 2).t()[:1], None),
            (torch.zeros(1, dtype=torch.int16), None),
            (None, "x" * NOTE_LIMIT),
        ):
            with pytest.raises(ValueError, match=r"contiguous|int16|at most 1048576 bytes"):
                near.send(1, body=body, note=note)
        with pytest.raises(TypeError, match="not JSON serializable"):
            near.send(1, note=torch.zeros(1))
        with pytest.raises(ValueError, match="contiguous"):
            far.receive(torch.zeros(4)[::2], SOON)
        near.send(4)
        assert far.receive(deadline_s=SOON).kind == 4


@pytest.mark.parametrize(
    ("body", "buffer", "match"),
    [
        (torch.zeros(3), torch.zeros(4), "3 elements of torch.float32 does not fit the buffer of 4"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), "torch.float32 does not fit the buffer of 3 elements"),
        (torch.zeros(251), None, "a body of 1004 bytes is announced, the limit of this channel is 1000"),
    ],
)
def test_a_body_that_does_not_fit_ends_the_channel(body: Tensor, buffer: Tensor | None, match: str) -> None:
    with pair() as (near, far):
        far.peer, far.limit = "rank 3", 1000
        near.send(1, body=body)
        with pytest.raises(MismatchError, match=f"from rank 3: .*{match}.*; the connection is closed"):
            far.receive(buffer, SOON)
        assert far.closed
        assert isinstance(lost(lambda: near.receive(deadline_s=SOON)), Closed)


PARTS = {
    "header": FrameHeader.of(1, (), b"", torch.zeros(4)).pack()[:40],
    "note": FrameHeader.of(1, (), b"12345", None).pack() + b"123",
    "body": FrameHeader.of(1, (), b"", torch.zeros(4)).pack() + bytes(7),
}


@pytest.mark.parametrize("part", PARTS)
def test_half_a_frame_and_then_silence(part: str) -> None:
    """Without a deadline of the call: what has begun has to end within `stall_s`."""
    with stranger() as (sock, channel):
        channel.stall_s = SHORT
        sock.sendall(PARTS[part])
        error = lost(channel.receive)
        assert isinstance(error, Late)
        assert "127.0.0.1:" in str(error)
        assert channel.closed


@pytest.mark.parametrize("part", PARTS)
def test_half_a_frame_and_then_the_end(part: str) -> None:
    with stranger() as (sock, channel):
        sock.sendall(PARTS[part])
        sock.close()
        assert isinstance(lost(lambda: channel.receive(deadline_s=SOON)), Closed)
        assert channel.closed


def test_a_wait_in_vain_leaves_the_channel_open() -> None:
    with pair() as (near, far):
        error = lost(lambda: near.receive(deadline_s=SHORT))
        assert isinstance(error, Late)
        assert "server did not answer in time" in str(error)
        assert not near.closed
        far.send(5)
        assert near.receive(deadline_s=SOON).kind == 5


@pytest.mark.parametrize("stall", [False, True])
def test_a_peer_that_takes_nothing(stall: bool) -> None:
    """By the deadline of the call, or else by the channel's `stall_s`."""
    with pair() as (near, _):
        near.stall_s = SHORT if stall else SOON
        error = lost(lambda: near.send(1, body=torch.zeros(HUGE), deadline_s=None if stall else SHORT))
        assert isinstance(error, Late)
        assert "server did not take what was sent in time" in str(error)
        assert near.closed
        assert near.bytes_sent == 0


def test_waiting_for_another_threads_frame_has_a_deadline() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(_: FrameHeader) -> Tensor:
        inside.set()
        assert go_on.wait(SOON)
        return torch.zeros(1)

    with pair() as (near, far):
        near.send(1, body=torch.ones(1))
        first = threading.Thread(target=lambda: far.receive(slow, SOON))
        first.start()
        assert inside.wait(SOON)
        error = lost(lambda: far.receive(deadline_s=SHORT))
        go_on.set()
        first.join()
        assert isinstance(error, Late)
        assert "the frame before this one" in str(error)
        assert not far.closed


def test_closing_ends_every_wait_and_lets_go_of_the_socket() -> None:
    errors: list[BaseException] = []
    begun = threading.Event()

    def buffer(header: FrameHeader) -> Tensor:
        begun.set()
        return torch.zeros(header.numel)

    with stranger() as (sock, channel):
        waits = [
            threading.Thread(target=lambda: errors.append(lost(lambda: channel.receive(buffer)))),
            threading.Thread(target=lambda: errors.append(lost(lambda: channel.send(1, body=torch.zeros(HUGE))))),
        ]
        for thread in waits:
            thread.start()
        sock.sendall(FrameHeader.of(1, (), b"", torch.zeros(4)).pack())  # and no body
        assert begun.wait(SOON)
        assert len(sock.recv(1)) == 1  # both are under way by now
        channel.close()
        channel.close()
        for thread in waits:
            thread.join(SOON)
        assert [type(error) for error in errors] == [Closed, Closed]
        assert all("was closed here" in str(error) for error in errors)
        assert channel._sock.fileno() == -1
        assert isinstance(lost(lambda: channel.send(1)), Closed)
        assert isinstance(lost(channel.receive), Closed)


def test_a_descriptor_in_use_is_not_given_away() -> None:
    """Closed while a thread is inside: its number must not come to name another file under that thread's hands."""
    kept: list[int] = []

    def close(header: FrameHeader) -> Tensor:
        far.close()
        kept.append(far._sock.fileno())
        return torch.zeros(header.numel)

    with pair() as (near, far):
        near.send(1, body=torch.zeros(4))
        assert isinstance(lost(lambda: far.receive(close, SOON)), Closed)
        assert kept[0] >= 0
        assert far._sock.fileno() == -1
