# SPDX-License-Identifier: Apache-2.0
"""What every worker of a connection was doing when the connection failed.

A worker that finds the failure writes into the store what it was waiting for. A worker that is busy in the user's
program cannot, so a thread of its process answers for it, on a store connection of its own (`Responder`). A process
that is dead, stopped or cut off does neither.

Answers are JSON of limited length; no received data is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from paceline.core import runtime
from paceline.core.world import World
from paceline.errors import PacelineError

ASLEEP = timedelta(hours=1)
"""Timeout of one wait at the store; the wait is repeated."""
SHOWN = 16
"""Most rows of the table in an error message; the event log has all of them."""
LONGEST = 200
"""Most characters of a text from another worker."""

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (_HOME, os.path.dirname(os.__file__))
"""paceline and the standard library with its compiled part (calling `sysconfig` takes long)."""


@dataclass(frozen=True)
class Doing:
    """What a worker was doing.

    Attributes:
        state: "waits" in an operation, is "busy" elsewhere, or "silent".
        operation: for which it waits, or "".
        number: of that operation, or of the last one that it began; counted since attach.
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
        """The inverse of `pack`; only "busy" if it is malformed."""
        try:
            fields = json.loads(text[: 20 * LONGEST])
            state = "waits" if fields["state"] == "waits" else "busy"
            operation, at = str(fields["operation"])[:LONGEST], str(fields["at"])[:LONGEST]
            return cls(state, operation, int(fields["number"]), float(fields["since_s"]), at)
        except (ValueError, KeyError, TypeError):
            return cls("busy")

    @property
    def text(self) -> str:
        """For messages; follows the worker's name."""
        place = f" ({self.at})" if self.at else ""
        if self.state == "waits":
            return f"waits for {self.operation}, operation {self.number}, since {self.since_s:.1f} s{place}"
        if self.state == "busy":
            return f"has not come: it began operation {self.number} last{f', and is at {self.at}' if self.at else ''}"
        return "does not answer: dead, stopped or cut off"


def table(world: World, doing: dict[int, Doing]) -> str:
    """A line for each worker, stragglers first; each begins with a newline and two spaces."""
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
    """The innermost frame of a thread that is in the user's program, as `train.py:31 main`."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and in_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def in_library(path: str) -> bool:
    """Whether a file belongs to paceline, the standard library or an installed package."""
    return path.startswith(("<", *_LIBRARIES)) or "site-packages" in path or "dist-packages" in path


def own_traceback(script: Path, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """An error's traceback from the program's first frame; a refusal's ends where the program called paceline."""
    frames = traceback.extract_tb(trace)
    first = next((n for n, frame in enumerate(frames) if frame.filename == str(script)), 0)
    last = len(frames)
    if isinstance(error, PacelineError):
        while last > first + 1 and in_library(frames[last - 1].filename):
            last -= 1
    failure = traceback.TracebackException(kind, error, trace)
    failure.stack = traceback.StackSummary.from_list(frames[first:last])
    return "".join(failure.format())


class DiagnosisKeys:
    """The keys in the store by which a connection's workers ask and answer.

    Args:
        store: of the connection.
        name: of the connection.
    """

    def __init__(self, store: Any, name: str) -> None:
        self.store, self._name = store, f"paceline/{name}"

    def key(self, kind: str, rank: int) -> str:
        """Of worker `rank`: what it was waiting for when it detected the failure ("failed"), that its responder is
        asked ("asked"), and the responder's answer ("answer")."""
        return f"{self._name}/{kind}/{rank}"

    def read(self, doing: dict[int, Doing], ranks: Iterable[int]) -> None:
        """Add new answers to `doing`; a worker's own replaces its responder's."""
        for rank in ranks:
            if rank not in doing and self.store.check([self.key("answer", rank)]):
                doing[rank] = Doing.unpack(self.store.get(self.key("answer", rank)))
            if (rank not in doing or doing[rank].state == "busy") and self.store.check([self.key("failed", rank)]):
                doing[rank] = Doing.unpack(self.store.get(self.key("failed", rank)))

    def ask(self, ranks: Iterable[int]) -> None:
        """Wake the responders of these workers."""
        for rank in ranks:
            self.store.set(self.key("asked", rank), b"what")


class Responder:
    """A thread that answers for a worker, once.

    It waits in the store's client without the GIL, and ends with the connection, the store or the process.

    Args:
        store: of the connection; the thread uses a client of its own.
        name: of the connection.
        rank: this worker.
        doing: gives what it is doing now.
        failed: called when another worker has asked.

    Attributes:
        asked: another worker has asked, so the connection has failed there.
        over_at: when that was, or when the store was gone; on the monotonic clock, seconds, infinite before.
    """

    def __init__(
        self, store: Any, name: str, rank: int, doing: Callable[[], Doing], failed: Callable[[], None]
    ) -> None:
        self.asked, self.over_at = False, math.inf
        self._keys, self._rank, self._doing, self._over = DiagnosisKeys(store, name), rank, doing, False
        self._failed = failed
        self._thread: threading.Thread | None = None
        with contextlib.suppress(Exception):  # a store that cannot be cloned: the worker has no responder
            own = DiagnosisKeys(store.clone(), name)
            self._thread = runtime.thread(self._attend, "paceline-responder", (own,))
            self._thread.start()
            runtime.end_at_exit(self, Responder.end)

    def _attend(self, keys: DiagnosisKeys) -> None:
        while not self._over:
            try:
                keys.store.wait([keys.key("asked", self._rank)], ASLEEP)
            except dist.DistStoreError:
                continue  # no worker has asked yet
            except RuntimeError:  # the store is gone
                self.over_at = time.monotonic()
                return
            if not self._over:
                self.asked, self.over_at = True, time.monotonic()
                with contextlib.suppress(Exception):
                    keys.store.set(keys.key("answer", self._rank), self._doing().pack())
                self._failed()
            return

    def end(self) -> None:
        """End the thread: one that waits in native code when the interpreter ends could crash it."""
        if self._thread is None or self._over:
            return
        self._over = True
        with contextlib.suppress(Exception):
            self._keys.store.set(self._keys.key("asked", self._rank), b"nothing")
        self._thread.join(1.0)
