# SPDX-License-Identifier: Apache-2.0
"""A simulated world does what the real one does, and the same thing for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from devtools.world import Broken, Process, SimMachine, World

from paceline.communication.sockets.channel import Closed, Late, connect, listen
from paceline.core import runtime

PORT = 5000


@pytest.fixture
def world() -> Iterator[World]:
    made = World(3)
    yield made
    made.close()
    assert not made.unexpected


def ends(world: World, *processes: Process, seconds: float = 100.0) -> None:
    """All end, and well."""
    assert world.run(lambda: all(one.dead for one in processes), seconds)
    for one in processes:
        if one.error is not None:
            raise one.error


def echo(frames: int) -> None:
    """Answer each frame of one connection with its numbers."""
    with listen("10.0.0.1", None, PORT).accept(10) as channel:
        for _ in range(frames):
            frame = channel.receive(deadline_s=50)
            channel.send(frame.kind, frame.numbers[:2], note=frame.note, deadline_s=1)
        channel.receive(deadline_s=50) if frames else None


def machines(world: World, serve: Callable[[], None], ask: Callable[[], None]) -> tuple[SimMachine, Process, Process]:
    one, other = world.machine("server"), world.machine("client")
    return one, one.start(serve, "serves"), other.start(ask, "asks")


def test_frames_come_in_order_and_a_partition_holds_them(world: World) -> None:
    got: list[tuple[float, int]] = []

    def ask() -> None:
        channel = connect("10.0.0.1", PORT, "the server", 10)
        world.network.cut("10.0.0.1", "10.0.0.2")
        world.after(5, lambda: world.network.heal("10.0.0.1", "10.0.0.2"))
        for number in range(5):
            channel.send(7, (number, 2), note={"n": number})
        for _ in range(5):
            frame = channel.receive(deadline_s=20)
            assert frame.note == {"n": frame.numbers[0]}
            got.append((runtime.monotonic(), frame.numbers[0]))

    _, server, client = machines(world, lambda: echo(5), ask)
    assert world.run(lambda: client.dead, 100) and client.error is None
    assert [number for _, number in got] == [0, 1, 2, 3, 4] and got[0][0] >= 5
    assert world.run(lambda: server.dead, 100) and isinstance(server.error, Closed)


def test_who_closes_with_unread_frames_resets_the_connection(world: World) -> None:
    """As TCP does: the other end loses what it has not read."""
    errors: list[str] = []

    def serve() -> None:
        channel = listen("10.0.0.1", None, PORT).accept(10)
        channel.send(1, note="last words")
        runtime.sleep(1)  # two frames have come, and nobody has read them
        channel.close()

    def ask() -> None:
        channel = connect("10.0.0.1", PORT, "the server", 10)
        channel.send(2)
        channel.send(3)
        runtime.sleep(3)
        with pytest.raises(Closed, match="reset") as caught:
            channel.receive(deadline_s=1)
        errors.append(str(caught.value))

    ends(world, *machines(world, serve, ask)[1:])
    assert errors


def test_a_machine_without_power_answers_nothing(world: World) -> None:
    """Its peer knows by its own deadline, or after a minute by TCP's."""

    def ask() -> None:
        channel = connect("10.0.0.1", PORT, "the server", 10)
        world.after(1, machine.fail)
        with pytest.raises(Late):
            channel.receive(deadline_s=5)
        with pytest.raises(Closed, match="timed out"):
            channel.receive()
        assert 60 < runtime.monotonic() < 70

    machine, _, client = machines(world, lambda: echo(1), ask)
    ends(world, client)


def test_a_world_that_does_not_end_says_so(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("devtools.world.scheduler.MOST_TURNS", 1000)

    def program() -> None:
        while True:
            runtime.sleep(0)

    world.machine("a").start(program, "spins")
    with pytest.raises(Broken, match="1001 turns"):
        world.run(lambda: False, 1e9)
