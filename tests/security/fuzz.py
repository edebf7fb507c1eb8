# SPDX-License-Identifier: Apache-2.0
"""Frames that are none, thrown at every door: `python -m tests.security.fuzz --frames 100000`.

Most are real ones with bytes flipped, cut, doubled, or with absurd numbers where lengths stand; the rest is noise. Of a
door is asked: no thread of it ends with an error, every connection is closed and written down, the memory stays within
a bound, and whoever has a right to be served is served afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tests.communication.connections import SOON
from tests.security.doors import DOORS, Opened, knock

GROWTH_MIB = 64
"""How much more memory than after the first frames a door may ever take."""
WARM = 50
"""Frames before memory is looked at: first uses load and allocate what stays."""
VISITORS = 4
"""Connections at a time."""
LENGTHS = [0, 1, 87, 88, 89, 0x7FFF, 0xFFFF, 1 << 20, (1 << 20) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
_LENGTH, _BODY = slice(12, 16), slice(16, 24)  # of a header: the bytes of the note, and of the body


@dataclass
class Found:
    """What came of it.

    Attributes:
        door: its name.
        frames: that were sent.
        unsaid: connections that were made and of which the log says nothing.
        failures: of threads, as text.
        growth_mib: of the most memory that the process ever had.
        seconds: in all.
    """

    door: str
    frames: int
    unsaid: int
    failures: list[str]
    growth_mib: float
    seconds: float


class _Lines(logging.Handler):
    """Counts connections that were made, and takes off those of which the log has a line."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._unsaid = Counter[str]()
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        assert isinstance(record.args, tuple)
        with self._guard:
            self._unsaid[str(record.args[0])] -= 1

    def made(self, sock: socket.socket) -> None:
        host, port = sock.getsockname()[:2]
        with self._guard:
            self._unsaid[f"{host}:{port}"] += 1

    @property
    def unsaid(self) -> int:
        with self._guard:
            return sum(count for count in self._unsaid.values() if count > 0)


def mutate(random_: random.Random, real: list[bytes]) -> bytes:
    """A frame that is hardly one."""
    data = bytearray(random_.choice(real))
    for _ in range(random_.choice((1, 1, 2, 4))):
        kind, where = random_.randrange(8), random_.randrange(len(data) + 1)
        if kind == 0 and data:
            data[where % len(data)] ^= 1 << random_.randrange(8)
        elif kind == 1 and data:
            data[where % len(data)] = random_.randrange(256)
        elif kind == 2:
            del data[where:]
        elif kind == 3:
            data[where:where] = random_.randbytes(random_.randrange(1, 64))
        elif kind == 4:
            data += random_.choice(real)
        elif kind == 5 and len(data) >= 24:
            data[_LENGTH] = struct.pack("<I", random_.choice(LENGTHS))
        elif kind == 6 and len(data) >= 24:
            data[_BODY] = struct.pack("<Q", random_.choice([*LENGTHS, 1 << 40, (1 << 64) - 1]))
        elif kind == 7:
            del data[where : where + random_.randrange(1, 32)]
    return bytes(data) if random_.random() < 0.9 else random_.randbytes(random_.randrange(200))


def fuzz(name: str, frames: int, seed: int = 0) -> Found:
    """Throw `frames` at a door."""
    failures: list[str] = []
    lines, before = _Lines(), threading.excepthook
    logger = logging.getLogger("paceline.doors")
    state = (logger.level, logger.propagate)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    threading.excepthook = lambda args: failures.append(f"{args.exc_type.__name__}: {args.exc_value}")
    began = time.monotonic()
    try:
        with DOORS[name]() as opened:
            _visit(opened, WARM, random.Random(seed), lines.made)
            opened.serves()
            at_first = _memory_mib()
            shares = [frames // VISITORS + (k < frames % VISITORS) for k in range(VISITORS)]
            visits = [
                threading.Thread(target=_visit, args=(opened, share, random.Random(f"{seed} {k}"), lines.made))
                for k, share in enumerate(shares)
            ]
            for visit in visits:
                visit.start()
            for visit in visits:
                visit.join()
            opened.serves()
            _until(lambda: not lines.unsaid)
            growth = _memory_mib() - at_first
    finally:
        threading.excepthook = before
        logger.removeHandler(lines)
        logger.setLevel(state[0])
        logger.propagate = state[1]
    return Found(name, frames + WARM, lines.unsaid, failures, round(growth, 1), round(time.monotonic() - began, 1))


def _visit(opened: Opened, frames: int, random_: random.Random, made: Callable[[socket.socket], None]) -> None:
    """One frame a connection; the door closes it, at the latest when nothing more comes."""
    for _ in range(frames):
        with knock(opened) as sock:
            made(sock)
            with contextlib.suppress(OSError):  # it may be closed before all is said
                sock.sendall(mutate(random_, opened.real))
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the port is free at once


def _until(met: Callable[[], bool]) -> None:
    """The line of the log is written behind the close that the visitor has seen."""
    deadline = time.monotonic() + SOON
    while not met() and time.monotonic() < deadline:
        time.sleep(0.01)


def _memory_mib() -> float:
    """The most that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def good(found: Found) -> bool:
    """Whether a door has stood it."""
    return not found.failures and not found.unsaid and found.growth_mib < GROWTH_MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=2000, help="in all, shared by the doors")
    parser.add_argument("--doors", nargs="+", choices=list(DOORS), default=list(DOORS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    stood = True
    for name in args.doors:
        found = fuzz(name, args.frames // len(args.doors), args.seed)
        stood = good(found) and stood
        print(json.dumps({**asdict(found), "failures": found.failures[:5], "stood": good(found)}), flush=True)
    return 0 if stood else 1


if __name__ == "__main__":
    sys.exit(main())
