# SPDX-License-Identifier: Apache-2.0
"""A simulated world does what the real one does, and the same thing for the same seed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

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


def test_threads_share_a_counter_under_a_lock_and_lose_without_it() -> None:
    def counted(seed: int, locked: bool) -> int:
        world, count = World(seed), [0]

        def add() -> None:
            for _ in range(20):
                before = count[0]
                runtime.sleep(0.001)
                count[0] = before + 1

        def add_locked(lock: threading.Lock) -> None:
            for _ in range(20):
                with lock:
                    before = count[0]
                    runtime.sleep(0.001)
                    count[0] = before + 1

        def program() -> None:
            lock = runtime.Lock()
            call: Callable[[], None] = (lambda: add_locked(lock)) if locked else add
            threads = [runtime.thread(call, f"t{k}") for k in range(3)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()

        ends(world, world.machine("a").start(program, "adds"))
        world.close()
        return count[0]

    assert counted(0, locked=True) == 60
    assert counted(0, locked=False) < 60


def test_a_condition_waits_for_its_notice_or_its_time(world: World) -> None:
    seen: list[object] = []

    def program() -> None:
        changed, values = runtime.Condition(), list[int]()

        def give() -> None:
            runtime.sleep(5)
            with changed:
                values.append(1)
                changed.notify_all()

        runtime.thread(give, "gives").start()
        with changed:
            seen.append(changed.wait_for(lambda: bool(values), 2))
            seen.append(runtime.monotonic())
            seen.append(changed.wait_for(lambda: bool(values), 60))
            seen.append(runtime.monotonic())

    ends(world, world.machine("a").start(program, "waits"))
    assert seen[0] is False and 2 <= seen[1] < 2.1 and seen[2] is True and 5 <= seen[3] < 5.1  # type: ignore[operator]


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


def test_a_killed_process_does_nothing_more(world: World) -> None:
    done: list[str] = []

    def program() -> None:
        try:
            runtime.sleep(5)
            done.append("slept")
        finally:
            done.append("unwound")
            runtime.disk().write(Path("/late"), b"x")

    machine = world.machine("a")
    process = machine.start(program, "dies")
    world.after(1, process.kill)
    assert world.run(lambda: not process.threads, 100)
    assert done == ["unwound"] and process.killed
    with pytest.raises(FileNotFoundError):
        machine.disk.read(Path("/late"))


def test_a_stopped_process_goes_on_where_it_was(world: World) -> None:
    times: list[float] = []

    def program() -> None:
        for _ in range(3):
            runtime.sleep(1)
            times.append(runtime.monotonic())

    process = world.machine("a").start(program, "stops")
    world.after(1.5, process.stop)
    world.after(9.5, process.go_on)
    ends(world, process)
    assert times[0] < 1.1 and times[1] >= 9.5


@pytest.mark.parametrize("synced", [True, False])
def test_power_takes_what_was_not_synced(synced: bool) -> None:
    """Over many seeds an unsynced replacement is the old file, the new one, or a part of it; a synced one is new."""
    found = set()
    for seed in range(40):
        world = World(seed)
        machine, path, beside = world.machine("a"), Path("/file"), Path("/file.tmp")

        def program() -> None:
            disk = runtime.disk()
            for data in (b"old", b"newer"):
                disk.write(beside, data)  # noqa: B023
                if synced or data == b"old":
                    disk.sync(beside)  # noqa: B023
                disk.replace(beside, path)  # noqa: B023
                if synced or data == b"old":
                    disk.sync_folder(path.parent)  # noqa: B023

        ends(world, machine.start(program, "writes"))
        machine.fail()
        process = machine.start(lambda: found.add(runtime.disk().read(path)), "reads")  # noqa: B023
        ends(world, process)
        world.close()
    if synced:
        assert found == {b"newer"}
    else:
        assert b"old" in found and found & {b"newer"[:size] for size in range(5)}


def test_a_world_that_does_not_end_says_so(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("devtools.world.scheduler.MOST_TURNS", 1000)

    def program() -> None:
        while True:
            runtime.sleep(0)

    world.machine("a").start(program, "spins")
    with pytest.raises(Broken, match="1001 turns"):
        world.run(lambda: False, 1e9)


def test_a_wait_that_nothing_can_end_is_seen(world: World) -> None:
    process = world.machine("a").start(lambda: runtime.Event().wait(), "waits for ever")
    assert not world.run(lambda: process.dead, 1e9)
