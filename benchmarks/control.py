# SPDX-License-Identifier: Apache-2.0
"""What the control plane costs with up to 1,000 members.

    python benchmarks/control.py [--workers 10 100 1000] [--exchanges 5] [--quick]

The members are simulated: the frames that they would send go to the state machine one after another, each answer is
encoded as a frame, and the record is written and synced to disk, all in one thread. There are no sockets.

The last line is a JSON object: each of `commit_ms` (median time from the last member's commit to the last encoded
verdict), `exchange_ms` (median time of all frames of an exchange: each member asks for data, comes, and commits),
`join_ms` (from one more worker's hello to the encoded answers), `grow_ms` (the commit with which it becomes a member),
`start_s` (until all have joined and hold the state), `member_kb` (memory that a member takes, with its leases),
`verdict_bytes` (of one frame) and `record_bytes` gives a figure for each number of workers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _quick

from paceline.communication.sockets.channel import Frame
from paceline.communication.sockets.frames import NUMBERS, FrameHeader, write_note
from paceline.flow.control import log_file, recovery, wire
from paceline.flow.control.dispatch import dispatch
from paceline.flow.control.messages import About, Terms
from paceline.flow.control.state_machine import StateMachine

BATCHES = 4
"""Leases that a member takes for an exchange."""
UNIT = 32
FINGERPRINT = {"rule": "bmuf(period=4)", "numbers": 1_000_000, "seed": 0}


class Plane:
    """The control plane of `workers` members, without sockets.

    Args:
        workers: number of members.
        folder: of its record.
    """

    def __init__(self, workers: int, folder: Path) -> None:
        self.machine = StateMachine(Terms(max_workers=workers + 1, expected=workers, timeout_s=600.0))
        self.record = folder / f"record_{workers}.json"
        self.workers = workers
        self.now = 0.0
        self.serial = 0
        self.leases: dict[int, list[list[int]]] = {}
        self.bytes: dict[str, int] = {}

    def turn(self, call: Callable[[], Any]) -> None:
        """One event, as the server carries it out."""
        self.now += 1e-4
        call()
        if self.machine.dirty:
            self.machine.dirty = False
            log_file.write(self.record, recovery.state(self.machine, self.now))
        for one in self.machine.outbox.take():
            if one.worker is None:
                continue
            note = write_note(one.note)
            kind = wire.MESSAGE_KINDS[one.kind]
            self.bytes[one.kind] = len(FrameHeader.of(kind, (one.serial, *one.numbers), note, None).pack()) + len(note)
            if one.kind == "answer" and len(one.numbers) > 1:
                self.leases.setdefault(one.worker, []).append([int(number) for number in one.numbers[1:5]])

    def frame(self, worker: int, kind: int, numbers: tuple[int, ...], note: Any = None) -> None:
        """A member's frame."""
        whole = Frame(kind, (*numbers, *[0] * (NUMBERS - len(numbers))), None, note)
        self.turn(lambda: dispatch(self.machine, worker, whole, self.now))

    def join(self) -> int:
        """One more worker; returns its number."""
        number = self.machine.next_worker
        about = About(f"host{number}", "127.0.0.1", 1000 + number, FINGERPRINT)
        self.turn(lambda: self.machine.join(about, self.now))
        return number

    def start(self) -> None:
        """All join, and hold the common start."""
        for _ in range(self.workers):
            self.join()
        self.hold()

    def hold(self) -> None:
        """Newcomers hold the state."""
        generation = self.machine.generation
        for worker in sorted(generation.newcomers):
            self.frame(worker, wire.HOLDS, (generation.number, 0, 0))

    def work(self) -> None:
        """Each member asks for its leases, and comes to the exchange."""
        members = self.machine.generation.workers
        for worker in members:
            for _ in range(BATCHES):
                self.serial += 1
                self.frame(worker, wire.ASK, (self.serial, 0, 0, 1 << 40, UNIT, UNIT, 0))
        for worker in members:
            self.frame(worker, wire.STARTS, (self.machine.exchange + 1,))

    def commit(self) -> float:
        """All members commit; returns the seconds that the last one's took."""
        machine, taken = self.machine, 0.0
        number, exchange = machine.generation.number, machine.exchange + 1
        for worker in machine.generation.workers:
            self.serial += 1
            note = {"marks": self.leases.pop(worker, []), "facts": {"minibatches": BATCHES}, "returned": []}
            began = time.perf_counter()
            self.frame(worker, wire.COMMIT, (self.serial, number, exchange), note)
            taken = time.perf_counter() - began
        if machine.exchange != exchange:
            raise RuntimeError(f"exchange {exchange} of {self.workers} members was not committed")
        return taken


def measure(workers: int, exchanges: int, folder: Path) -> dict[str, float]:
    """All figures of one number of workers."""
    plane = Plane(workers, folder)
    began = time.perf_counter()
    plane.start()
    found = {"start_s": round(time.perf_counter() - began, 3)}
    commits, wholes = [], []
    for _ in range(exchanges):
        began = time.perf_counter()
        plane.work()
        commits.append(plane.commit())
        wholes.append(time.perf_counter() - began)
    found["commit_ms"] = round(1e3 * statistics.median(commits), 2)
    found["exchange_ms"] = round(1e3 * statistics.median(wholes), 1)
    found["verdict_bytes"] = plane.bytes["verdict"]
    plane.work()
    began = time.perf_counter()
    plane.join()
    found["join_ms"] = round(1e3 * (time.perf_counter() - began), 2)
    found["grow_ms"] = round(1e3 * plane.commit(), 2)
    found["record_bytes"] = plane.record.stat().st_size
    return found


def memory(workers: int, folder: Path) -> float:
    """Kilobytes that a member takes."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    plane = Plane(workers, folder)
    plane.start()
    plane.work()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round((after - before) / 1e3 / workers, 2)


def main() -> None:
    """Measure, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description="The cost of the control plane.")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--exchanges", type=int, default=5)
    options = _quick.parse(parser, exchanges=2, workers=[10, 100])
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for workers in options.workers:
            found = measure(workers, options.exchanges, Path(folder))
            found["member_kb"] = memory(workers, Path(folder))
            print(f"{workers} members: " + ", ".join(f"{name} {value:g}" for name, value in found.items()), flush=True)
            for name, value in found.items():
                result.setdefault(name, {})[str(workers)] = value
    print(json.dumps(result))


if __name__ == "__main__":
    main()
