# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom: what every worker of a connection was doing when it failed.

Whoever finds the failure writes into the store what it was waiting for. A worker that is busy in the user's program
cannot, so a thread of its process answers for it, on a connection of its own to the store, where it sleeps until
somebody asks (`Witness`). A process that is dead, stopped or cut off does neither, which tells it from the others.

Answers are JSON, cut to a length; nothing that arrives is ever executed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.core.world import World

ASLEEP = timedelta(hours=1)
"""Nobody may ask for days; the store's client wants a limit all the same."""
SHOWN = 16
"""Rows of a table in an error message; the event log has all of them."""
LONGEST = 200
"""Characters of a text that comes from another worker."""

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (_HOME, os.path.dirname(os.__file__))
"""paceline and the standard library, whose compiled part lies beneath (asking `sysconfig` takes long)."""


@dataclass(frozen=True)
class Doing:
    """What a worker was doing.

    Attributes:
        state: "waits" in an operation, is "busy" elsewhere, or "silent".
        operation: that it waits for, or "".
        number: of that operation, or of the last one that it began, counted since attach.
        since_s: seconds that it has waited.
        at: the innermost place in the user's program: file, line, function.
    """

    state: str
    operation: str = ""
    number: int = 0
    since_s: float = 0.0
    at: str = ""

    def pack(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, text: bytes) -> Doing:
        """The inverse of `pack`; "busy" and nothing more where it cannot be read."""
        try:
            said = json.loads(text[: 20 * LONGEST])
            state = "waits" if said["state"] == "waits" else "busy"
            operation, at = str(said["operation"])[:LONGEST], str(said["at"])[:LONGEST]
            return cls(state, operation, int(said["number"]), float(said["since_s"]), at)
        except (ValueError, KeyError, TypeError):
            return cls("busy")

    @property
    def text(self) -> str:
        """In words, to follow the worker's name."""
        place = f" ({self.at})" if self.at else ""
        if self.state == "waits":
            return f"waits for {self.operation}, operation {self.number}, since {self.since_s:.1f} s{place}"
        if self.state == "busy":
            return f"has not come: it began operation {self.number} last{f', and is at {self.at}' if self.at else ''}"
        return "does not answer: dead, stopped or cut off"


def table(world: World, doing: dict[int, Doing]) -> str:
    """A line a worker, those first that others wait for; each begins with a new line and two spaces."""
    order = {"silent": 0, "busy": 1, "waits": 2}
    ranks = sorted(doing, key=lambda rank: (order[doing[rank].state], doing[rank].number, rank))
    lines = [f"\n  {world.name(rank)} {doing[rank].text}" for rank in ranks[:SHOWN]]
    if len(ranks) > SHOWN:
        lines.append(f"\n  and {len(ranks) - SHOWN} more")
    return "".join(lines)


def rows(doing: dict[int, Doing]) -> list[dict[str, Any]]:
    """The same for the event log."""
    return [{"rank": rank, **asdict(one), "text": one.text} for rank, one in sorted(doing.items())]


def place_of(thread: int) -> str:
    """Where a thread is in the user's program: the innermost frame that is in no library, `train.py:31 main`."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and in_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def in_library(path: str) -> bool:
    """Whether a file is one of paceline, the standard library or an installed package."""
    return path.startswith(("<", *_LIBRARIES)) or "site-packages" in path or "dist-packages" in path


class DiagnosisKeys:
    """The places in the store where a connection's workers ask and answer.

    Args:
        store: of the connection.
        name: of the connection.
    """

    def __init__(self, store: Any, name: str) -> None:
        self.store, self._name = store, f"paceline/{name}"

    def came(self, rank: int) -> str:
        """Where a worker says what it was waiting for when it found the failure."""
        return f"{self._name}/failed/{rank}"

    def asked(self, rank: int) -> str:
        """Where others ask for a worker that has not come."""
        return f"{self._name}/asked/{rank}"

    def answer(self, rank: int) -> str:
        """Where its witness answers."""
        return f"{self._name}/answer/{rank}"

    def read(self, doing: dict[int, Doing], ranks: Iterable[int]) -> None:
        """Take what those have said who are not known, or known as busy; what a worker says itself is better."""
        for rank in ranks:
            if rank not in doing and self.store.check([self.answer(rank)]):
                doing[rank] = Doing.unpack(self.store.get(self.answer(rank)))
            if (rank not in doing or doing[rank].state == "busy") and self.store.check([self.came(rank)]):
                doing[rank] = Doing.unpack(self.store.get(self.came(rank)))

    def ask(self, ranks: Iterable[int]) -> None:
        """Wake the witnesses of these."""
        for rank in ranks:
            self.store.set(self.asked(rank), b"what")


_all: weakref.WeakSet[Responder] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A program may end without closing its connections."""
    for witness in list(_all):
        witness.end()


class Responder:
    """A thread that answers for a worker, once.

    It sleeps in the store's client, off the interpreter's lock, and ends with the connection, the store or the process.

    Args:
        store: of the connection; the thread takes a client of its own.
        name: of the connection.
        rank: this worker.
        doing: what it is doing now.
    """

    def __init__(self, store: Any, name: str, rank: int, doing: Callable[[], Doing]) -> None:
        self._places, self._rank, self._doing, self._over = DiagnosisKeys(store, name), rank, doing, False
        self._thread: threading.Thread | None = None
        with contextlib.suppress(Exception):  # a store that cannot be cloned leaves the worker without a witness
            own = DiagnosisKeys(store.clone(), name)
            self._thread = threading.Thread(target=self._attend, args=(own,), name="paceline-witness", daemon=True)
            self._thread.start()
            _all.add(self)

    def _attend(self, places: DiagnosisKeys) -> None:
        while not self._over:
            try:
                places.store.wait([places.asked(self._rank)], ASLEEP)
            except dist.DistNetworkError:
                return  # the store is gone, and whoever could ask with it
            except dist.DistStoreError:
                continue  # nobody asked within the hour
            except RuntimeError:
                return
            if not self._over:
                with contextlib.suppress(Exception):
                    places.store.set(places.answer(self._rank), self._doing().pack())
            return

    def end(self) -> None:
        """Let the thread go; a thread that waited in native code at the interpreter's end could bring it down."""
        if self._thread is None or self._over:
            return
        self._over = True
        with contextlib.suppress(Exception):
            self._places.store.set(self._places.asked(self._rank), b"nothing")
        self._thread.join(1.0)
