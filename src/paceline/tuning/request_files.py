# SPDX-License-Identifier: Apache-2.0
"""Requests to change settings of an active run, and those from outside of it, as files beside its log: `DIR/tune/`.

::

    NAME.request.json     a request
    NAME.taken.json       the same, once a worker has taken it (by a rename, so that only one worker does)
    NAME.answer.json      its outcome

There is no port and no secret: write permission on the directory is permission to tune. Files are written atomically
(under another name, then renamed). Files from before the run's start belong to another run, and are ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RuleError
from paceline.tuning.names import Changes, flat


@dataclass(eq=False)
class TuneRequest:
    """A request to change settings, and its outcome.

    Attributes:
        changes: name -> value.
        revert: whether to undo the last change instead.
        by: the rank that asked; 0 if the period controller did, or a file asks all.
        applied: whether it is in effect.
        refused: why it was refused; of a request file, why it is invalid.
        block: blocks exchanged before it took effect.
        minibatch: this worker's minibatches before it took effect; the next one is the first with the new values.
        values: name -> [before, after], once applied.
        why: the period controller's measurements; its changes cannot be undone.
        request_file: name of the file that it came in, if any.
        number: of this worker's requests.
    """

    changes: Changes
    revert: bool
    by: int = 0
    applied: bool = False
    refused: str = ""
    block: int = 0
    minibatch: int = 0
    values: dict[str, list[Any]] | None = None
    request_file: str = ""
    number: int = 0
    why: str = ""

    @property
    def open(self) -> bool:
        """Whether it is neither applied nor refused yet."""
        return not (self.applied or self.refused)


FOLDER = "tune"
REQUEST, TAKEN, ANSWER = ".request.json", ".taken.json", ".answer.json"
LOOK_EVERY_S = 1.0
LIMIT_BYTES = 1 << 16
"""A larger file is not read."""


class RequestFiles:
    """A worker's view of the directory, at most once a second.

    Args:
        log: the log directory, if any.
        each: whether every worker reads every request, instead of one worker taking it.
        clock: seconds.
    """

    def __init__(self, log: str | Path | None, each: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = None if log is None else Path(log) / FOLDER
        self.each, self._clock = each, clock
        self._seen: set[str] = set(self._names())
        self._looked = clock()

    def _names(self) -> list[str]:
        """Requests that no worker has taken, oldest first."""
        try:
            names = [] if self.folder is None else os.listdir(self.folder)
        except OSError:  # there was no request yet
            return []
        return sorted(name.removesuffix(REQUEST) for name in names if name.endswith(REQUEST))

    def look(self, now: bool = False) -> list[TuneRequest]:
        """The new requests; does not touch the file system within `LOOK_EVERY_S` of the last look, unless `now`."""
        if self.folder is None or (not now and self._clock() - self._looked < LOOK_EVERY_S):
            return []
        self._looked = self._clock()
        new = [name for name in self._names() if name not in self._seen]
        self._seen.update(new)
        return [request for name in new if (request := self._take(name)) is not None]

    def _take(self, name: str) -> TuneRequest | None:
        assert self.folder is not None
        path = self.folder / (name + REQUEST)
        if not self.each:
            try:
                path = path.rename(self.folder / (name + TAKEN))
            except OSError:  # another worker was faster, or permission is missing
                return None
        try:
            body = read(path)
            changes = body.get("changes") or {}
            if not isinstance(changes, dict):
                raise RuleError(f"changes must be an object, got {changes!r}")
            revert = bool(body.get("revert"))
            return TuneRequest(flat(changes) if changes or not revert else {}, revert, request_file=name)
        except (OSError, ValueError) as error:
            return TuneRequest({}, False, request_file=name, refused=str(error))

    def put(self, changes: Changes, revert: bool) -> str:
        """Write a request to all workers, from within the run; returns its name."""
        assert self.folder is not None
        name = post(self.folder.parent, changes, revert)
        self._seen.add(name)
        return name

    def answer(self, name: str, body: dict[str, Any]) -> None:
        """Write the outcome of a request; the first answer stays."""
        assert self.folder is not None
        with contextlib.suppress(OSError):  # training goes on without the answer
            path = self.folder / (name + ANSWER)
            if not path.exists():
                write(path, body)


def post(log: Path, changes: Changes, revert: bool) -> str:
    """Write a request into the log directory of a run; returns its name."""
    folder = log / FOLDER
    folder.mkdir(exist_ok=True)
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    write(folder / (name + REQUEST), {"changes": changes, "revert": revert, "unix_s": time.time()})
    return name


def answer_to(log: Path, name: str) -> dict[str, Any] | None:
    """The answer to a request, if any."""
    path = log / FOLDER / (name + ANSWER)
    return read(path) if path.exists() else None


def is_taken(log: Path, name: str) -> bool:
    """Whether a worker has taken the request."""
    return (log / FOLDER / (name + TAKEN)).exists()


def withdraw(log: Path, name: str) -> bool:
    """Withdraw a request; False if a worker has taken it."""
    try:
        (log / FOLDER / (name + REQUEST)).unlink()
    except OSError:
        return False
    return True


def write(path: Path, body: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.write_text(json.dumps(body), encoding="utf-8")
    partial.rename(path)


def read(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError for anything else. Does not block on a FIFO or follow a link."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > LIMIT_BYTES:
            raise RuleError(f"{path.name} is no file of at most {LIMIT_BYTES} bytes")
        text = file.read(LIMIT_BYTES)
    body = json.loads(text)
    if not isinstance(body, dict):
        raise RuleError(f"{path.name} holds a {type(body).__name__}, not an object")
    return body
