# SPDX-License-Identifier: Apache-2.0
"""What the control plane costs with up to 1,000 members.

    python benchmarks/speed/control.py [--workers 10 100 1000] [--exchanges 5] [--joins 20] [--quick]

The server is that of real runs, with its threads, its record on the disk and its flight tape. The connections are
simulated: what a member sends is put into a queue, and a frame that the server sends is encoded and counted. Each
member has a connection for requests and one for heartbeats.

The last line is a JSON object. Each of these gives a figure for each number of workers:

- `start_s`: until all have joined and hold the state; `scattered_start_s`: if nobody has said how many will come, null
  if that took more than two minutes.
- `commit_ms` and `commit_cpu_ms`: median time by the clock and of the processor, from the last member's commit to the
  last encoded verdict. `exchange_ms`: of a whole exchange: each member asks for data four times, comes, and commits.
- `join_ms` and `join_worst_ms`: median and worst time from one more worker's hello until it is welcome and in the
  record. `grow_ms`: the commit with which all these become members, until the last member has the new generation.
- `member_kb`: memory of the process for each member, with its threads; `verdict_bytes` of one frame; `record_bytes`.

`commit_ms_1000` and `commit_cpu_ms_1000` are those of 1,000 workers, null if there were none.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick

from paceline.communication.sockets.channel import Closed, Frame, Late
from paceline.communication.sockets.frames import NUMBERS, FrameHeader, write_note
from paceline.flow.control import wire
from paceline.flow.control.messages import About, Terms
from paceline.flow.control.server import ControlServer

BATCHES = 4
"""Leases that a member takes for an exchange."""
UNIT = 32
FINGERPRINT = {"rule": "bmuf(period=4)", "numbers": 1_000_000, "seed": 0}
LIMIT_S = 120.0
"""Seconds after which a wait is given up."""
KINDS = {number: kind for kind, number in wire.MESSAGE_KINDS.items()} | {wire.WELCOME: "welcome"}


class Line:
    """A simulated connection: the server's end.

    Args:
        got: gets the kind of every frame that the server sends, its numbers and its bytes.
    """

    def __init__(self, got: Callable[[str, tuple[int, ...], int], None]) -> None:
        self.peer, self.identity = "a simulated worker", None
        self._got = got
        self._inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

    def put(self, kind: int, numbers: tuple[int, ...] = (), note: Any = None) -> None:
        """The member sends a frame."""
        self._inbox.put(Frame(kind, (*numbers, *[0] * (NUMBERS - len(numbers))), None, note))

    def receive(self, buffer: None = None, deadline_s: float | None = None) -> Frame:
        try:
            frame = self._inbox.get(timeout=deadline_s)
        except queue.Empty:
            raise Late("no frame in time") from None
        if frame is None:
            raise Closed("closed")
        return frame

    def send(self, kind: int, numbers: tuple[int, ...] = (), note: Any = None, deadline_s: float | None = None) -> None:
        text = write_note(note)
        header = FrameHeader.of(kind, numbers, text, None).pack()
        self._got(KINDS.get(kind, ""), tuple(numbers), len(header + text))

    def takes(self) -> bool:
        return True

    def adjust(self, **settings: Any) -> None:
        pass

    def close(self) -> None:
        self._inbox.put(None)


class Lines:
    """The listener: hands over the connections that the benchmark makes."""

    def __init__(self) -> None:
        self.port = 0
        self._made: queue.SimpleQueue[Line | None] = queue.SimpleQueue()

    def connect(self, line: Line) -> None:
        """A connection arrives."""
        self._made.put(line)

    def accept_while(self, wanted: Callable[[], bool]) -> Iterator[Line]:
        while (line := self._made.get()) is not None:
            yield line

    def close(self) -> None:
        self._made.put(None)


class Plane:
    """The control plane, and its members as it sees them.

    Args:
        workers: number of members at the start.
        more: workers that may join later.
        folder: of its record.
        expected: how many it waits for before the run begins.
    """

    def __init__(self, workers: int, more: int, folder: Path, expected: int) -> None:
        self.record = folder / f"record_{workers}_{expected}.json"
        terms = Terms(max_workers=workers + more, expected=expected, timeout_s=600.0, start_s=600.0 * bool(expected))
        self.server = ControlServer("127.0.0.1", 0, None, terms, self.record)
        self.server._listener.close()
        self.listener = self.server._listener = Lines()  # type: ignore[assignment]
        self.server.start()
        self.machine = self.server._machine
        self.lines: dict[int, Line] = {}
        self.leases: dict[int, list[list[int]]] = {}
        self.counts, self.bytes = Counter[str](), dict[str, int]()
        self._changed = threading.Condition()
        self._ready: Callable[[], bool] = lambda: False
        self.serial = 0

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Until that is so; looked at after every frame that the server sends."""
        with self._changed:
            self._ready = ready
            if not self._changed.wait_for(ready, LIMIT_S):
                raise TimeoutError(f"{what}: not within {LIMIT_S:g} s; so far {dict(self.counts)}")

    def hello(self) -> Line:
        """One more worker connects, and says hello."""
        mine: list[int] = []

        def got(kind: str, numbers: tuple[int, ...], size: int) -> None:
            with self._changed:
                self.bytes[kind] = size
                self.counts[kind] += 1
                if kind == "welcome":
                    mine.append(numbers[0])
                    self.lines[numbers[0]] = line
                elif kind == "answer" and len(numbers) > 2:
                    self.leases.setdefault(mine[0], []).append(list(numbers[2:6]))
                if self._ready():
                    self._changed.notify()

        line = Line(got)
        number = len(self.lines)
        line.put(wire.HELLO, note=About(f"host{number}", "127.0.0.1", 1000 + number, FINGERPRINT).note())
        self.listener.connect(line)
        return line

    def start(self, workers: int) -> float:
        """All join, and hold the common start; seconds."""
        began = time.perf_counter()
        for _ in range(workers):
            self.hello()
        self._until(lambda: len(self.lines) == len(self.machine.generation.members) == workers)
        self.hold()
        return round(time.perf_counter() - began, 3)

    def hold(self) -> None:
        """Newcomers hold the state."""
        generation = self.machine.generation
        for worker in generation.newcomers:
            self.lines[worker].put(wire.HOLDS, (generation.number, 0, 0))
        self._until(lambda: all(one.holds for one in self.machine.members))
        with self.server._turn():  # until it is in the record
            pass

    def pulses(self) -> None:
        """The members' second connections."""
        for worker in self.lines:
            pulse = Line(lambda kind, numbers, size: None)
            pulse.put(wire.PULSE, (worker,), self.machine.workers[worker].secret)
            pulse.put(wire.BEAT, (0,), "trains")
            self.listener.connect(pulse)
        self._until(lambda: len(self.server._heartbeats) == len(self.lines))

    def _until(self, ready: Callable[[], bool]) -> None:
        """Until that is so of the server, which tells nobody."""
        until = time.monotonic() + LIMIT_S
        while True:
            with self.server._lock:
                if ready():
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"not within {LIMIT_S:g} s; so far {dict(self.counts)}")
            time.sleep(0.002)

    def work(self) -> None:
        """Each member asks for its leases, and comes to the exchange."""
        members, before = self.machine.generation.workers, self.counts["answer"]
        for turn in range(BATCHES):
            for worker in members:
                self.serial += 1
                self.lines[worker].put(wire.ASK, (self.serial, 0, 0, 1 << 40, UNIT, UNIT, 0))
            answers = before + (turn + 1) * len(members)
            self.wait("answers", lambda answers=answers: self.counts["answer"] == answers)  # type: ignore[misc]
        for worker in members:
            self.lines[worker].put(wire.STARTS, (self.machine.exchange + 1,))

    def commit(self, generations: int = 0) -> tuple[float, float]:
        """All members commit; the seconds after the last one's, by the clock and of the processor.

        Args:
            generations: new members, each of which gets the generation, as all others do.
        """
        machine = self.machine
        number, exchange, members = machine.generation.number, machine.exchange + 1, machine.generation.workers
        verdicts = self.counts["verdict"] + len(members)
        told = self.counts["generation"] + (len(members) + generations if generations else 0)
        for worker in members:
            if worker == members[-1]:
                self._until(lambda: sum(one.commit is not None for one in machine.members) == len(members) - 1)
                clock, processor = time.perf_counter(), time.process_time()
            self.serial += 1
            note = {"marks": self.leases.pop(worker, []), "facts": {"minibatches": BATCHES}, "returned": []}
            self.lines[worker].put(wire.COMMIT, (self.serial, number, exchange), note)
        self.wait("verdicts", lambda: self.counts["verdict"] == verdicts and self.counts["generation"] >= told)
        return time.perf_counter() - clock, time.process_time() - processor

    def join(self) -> float:
        """One more worker; seconds until it is welcome, and in the record."""
        before, began = len(self.lines), time.perf_counter()
        self.hello()
        self.wait("a welcome", lambda: len(self.lines) > before)
        with self.server._turn():
            pass
        return time.perf_counter() - began

    def close(self) -> None:
        """End all threads."""
        for line in self.lines.values():
            line.close()
        self.server.close()


def resident_kb() -> float:
    """Memory of this process that is in use, kB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e3


def measure(workers: int, exchanges: int, joins: int, folder: Path) -> dict[str, float]:
    """All figures of one number of workers."""
    gc.freeze()  # as the launcher does
    before = resident_kb()
    plane = Plane(workers, joins, folder, expected=workers)
    found = {"start_s": plane.start(workers)}
    plane.pulses()
    commits, wholes = [], []
    for _ in range(exchanges):
        began = time.perf_counter()
        plane.work()
        commits.append(plane.commit())
        wholes.append(time.perf_counter() - began)
    found["commit_ms"] = round(1e3 * statistics.median(clock for clock, _ in commits), 2)
    found["commit_cpu_ms"] = round(1e3 * statistics.median(processor for _, processor in commits), 2)
    found["exchange_ms"] = round(1e3 * statistics.median(wholes), 1)
    found["verdict_bytes"] = plane.bytes["verdict"]
    found["record_bytes"] = plane.record.stat().st_size
    found["member_kb"] = round((resident_kb() - before) / workers, 2)
    plane.work()
    seconds = [plane.join() for _ in range(joins)]
    found["join_ms"] = round(1e3 * statistics.median(seconds), 2)
    found["join_worst_ms"] = round(1e3 * max(seconds), 2)
    found["grow_ms"] = round(1e3 * plane.commit(joins)[0], 2)
    plane.close()
    return found


def scattered(workers: int, folder: Path) -> float | None:
    """The start if nobody has said how many will come: each becomes a member as soon as it may."""
    plane = Plane(workers, 0, folder, expected=0)
    try:
        return plane.start(workers)
    except TimeoutError:
        return None
    finally:
        plane.close()


def main() -> None:
    """Measure, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description="The cost of the control plane.")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--exchanges", type=int, default=5)
    parser.add_argument("--joins", type=int, default=20, help="workers that join afterwards, one by one")
    options = _quick.parse(parser, exchanges=2, joins=3, workers=[10, 50])
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for workers in options.workers:
            found: dict[str, float | None] = {**measure(workers, options.exchanges, options.joins, Path(folder))}
            found["scattered_start_s"] = scattered(workers, Path(folder))
            print(f"{workers} members: " + ", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
            for name, value in found.items():
                result.setdefault(name, {})[str(workers)] = value
    for name in ("commit_ms", "commit_cpu_ms"):
        result[f"{name}_1000"] = result[name].get("1000")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
