# SPDX-License-Identifier: Apache-2.0
"""Object stores in a process that was forked after its parent had used obstore.

obstore's threads do not survive a fork: a child that used it again would wait for ever. A `DataLoader` forks its
processes by default on Linux, so this is the usual case. There a fresh process reads the store and passes the bytes on
through pipes: it runs :mod:`paceline.data.cache.bucket` by its path, is started at the first need and kept for the
next file, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing.util
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.data.cache.bucket import Failure
from paceline.errors import NotServedError

GRACE_S = 30.0
"""How much longer than a request may take until its relay counts as stuck; a start on a slow disk is part of that."""

PIPE_BYTES = 1 << 20
LONGEST_LINE = 1 << 16
END_S = 2.0

_obstore_is_lost = False
_all: weakref.WeakSet[Relay] = weakref.WeakSet()


def obstore_is_lost() -> bool:
    """Whether this process was forked from one that had obstore in use."""
    return _obstore_is_lost


def _after_fork() -> None:
    global _obstore_is_lost
    _obstore_is_lost = _obstore_is_lost or "obstore" in sys.modules
    for relay in list(_all):
        relay.forget()
    _all.clear()


os.register_at_fork(after_in_child=_after_fork)


class _Ended(Failure):
    """The process that was asked is no more."""


class Relay:
    """One process that reads object stores, for one thread at a time.

    Attributes:
        in_step: whether the last answer has been read to its end; after any other, bytes may come that nobody wants.

    Raises:
        Failure: it could not be started.
    """

    def __init__(self) -> None:
        self.in_step = True
        if not sys.executable:
            raise Failure("wrong", f"there is no Python to start beside this process; {CURES}")
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("bucket.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            raise Failure("unavailable", f"no process could be started to read the store: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        with contextlib.suppress(OSError, AttributeError):  # fewer turns; where it is not to be had, more of them
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._rest = b""  # read already, of the next line
        self._greeted = False
        _all.add(self)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it may be asked."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        """Send a request; the head of the answer."""
        lines = [] if self._greeted else [json.dumps({"path": [path for path in sys.path if isinstance(path, str)]})]
        self._greeted, self.in_step = True, False
        self._write("".join(f"{line}\n" for line in [*lines, json.dumps(request)]).encode(), patience_s)
        return self._line(patience_s)

    def chunks(self, patience_s: float) -> Iterator[bytes]:
        """What follows the head, to its end."""
        while "bytes" in (head := self._line(patience_s)):
            yield self._bytes(int(head["bytes"]), patience_s)

    def _line(self, patience_s: float) -> dict[str, Any]:
        text = self._rest
        while b"\n" not in text:
            if len(text) > LONGEST_LINE:
                raise self._broken("says what makes no sense")
            text += self._read(LONGEST_LINE, patience_s)
        line, _, self._rest = text.partition(b"\n")
        try:
            found = dict(json.loads(line))
        except ValueError:
            raise self._broken("says what makes no sense") from None
        self.in_step = "error" in found or "end" in found
        if "error" in found:
            raise Failure(str(found["error"]), str(found["text"]))
        return found

    def _bytes(self, count: int, patience_s: float) -> bytes:
        found = bytearray(count)
        at = min(count, len(self._rest))
        found[:at], self._rest = self._rest[:at], self._rest[at:]
        while at < count:
            self._wait(self._out, select.POLLIN, patience_s)
            got = os.readv(self._out, [memoryview(found)[at:]])
            if not got:
                raise self._ended()
            at += got
        return bytes(found)

    def _read(self, most: int, patience_s: float) -> bytes:
        self._wait(self._out, select.POLLIN, patience_s)
        text = os.read(self._out, most)
        if not text:
            raise self._ended()
        return text

    def _write(self, text: bytes, patience_s: float) -> None:
        try:
            while text:
                self._wait(self._in, select.POLLOUT, patience_s)
                text = text[os.write(self._in, text) :]
        except BrokenPipeError:
            raise self._ended() from None

    def _wait(self, descriptor: int, event: int, patience_s: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(1000 * patience_s):
            raise self._broken(f"has not answered for {patience_s:.0f} s")

    def _broken(self, what: str) -> Failure:
        return Failure("unavailable", self._says(what))

    def _says(self, what: str) -> str:
        return f"process {self.pid}, which reads the store for this one, {what}"

    def _ended(self) -> Failure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        return _Ended("unavailable", self._says(f"has ended (status {self._process.returncode})"))

    def close(self) -> None:
        """End the process: its input ends, or it is killed where that does not do. Twice is once."""
        _all.discard(self)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it at once, in whatever it is doing."""
        self._process.kill()
        self.close()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.returncode is None:
            self.kill()

    def forget(self) -> None:
        """In a forked child: it stays with the parent, and must see its input end when the parent goes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.returncode = 0  # so that nobody here waits for what is not our child


class Relays:
    """The relays of one process for one store: as many as are asked at a time.

    Args:
        options: of the store; must be JSON, because they go through a pipe and nothing that is unpickled should.
        timeout_s: of one request.

    Raises:
        NotServedError: an option is not JSON.
    """

    def __init__(self, options: Mapping[str, Any], timeout_s: float) -> None:
        self.process = os.getpid()
        self._options, self._timeout_s = plain(options, "options"), timeout_s
        self._lock, self._idle, self._closed = threading.Lock(), list[Relay](), False

    @contextmanager
    def get(self, url: str) -> Iterator[tuple[dict[str, Any], Iterator[bytes]]]:
        """Ask for an object.

        One that died with nothing to do is replaced without a word; that it did may show only when it is asked,
        because a process of several threads can be waited for only when the last of them is gone.

        Yields:
            the head of the answer (size, etag, sha256) and the bytes.

        Raises:
            Failure: see :class:`paceline.data.cache.bucket.Bucket`; also where the relay dies or is stuck.
        """
        relay, head = self._asked({"url": url, "options": self._options, "timeout_s": self._timeout_s})
        try:
            yield head, relay.chunks(self._patience_s)
        finally:
            self._give(relay)

    @property
    def _patience_s(self) -> float:
        return self._timeout_s + GRACE_S

    def _asked(self, request: Mapping[str, Any]) -> tuple[Relay, dict[str, Any]]:
        """A relay that has begun to answer, and the head of its answer."""
        while True:
            relay, fresh = self._take()
            try:
                return relay, relay.ask(request, self._patience_s)
            except _Ended:
                self._give(relay)
                if fresh:
                    raise
            except BaseException:
                self._give(relay)
                raise

    def _take(self) -> tuple[Relay, bool]:
        """A relay with nothing to do, and whether it has just been started."""
        with self._lock:
            while self._idle:
                relay = self._idle.pop()
                if relay.alive:
                    return relay, False
                relay.close()
            _end_all_at_exit()
        return Relay(), True

    def _give(self, relay: Relay) -> None:
        with self._lock:
            if relay.in_step and not self._closed:
                self._idle.append(relay)
                return
        relay.kill()

    def close(self) -> None:
        """End those that have nothing to do; others end when they are through."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for relay in idle:
            relay.close()


_ends_at_exit_of: int | None = None


def _end_all_at_exit() -> None:
    """Have the relays ended and waited for at the end of this process, whether it is one of a loader or not."""
    global _ends_at_exit_of
    if _ends_at_exit_of != os.getpid():
        _ends_at_exit_of = os.getpid()
        multiprocessing.util.Finalize(None, _end_all, exitpriority=0)


def _end_all() -> None:
    for relay in list(_all):
        relay.kill()


CURES = (
    "start the loader's processes with multiprocessing_context='spawn', or pass options={'backend': 'fsspec'}, or "
    "fetch the files in the parent"
)


def plain(value: Any, where: str) -> Any:
    """The same in what JSON knows; a time span is written as obstore reads it ("1500ms").

    Raises:
        NotServedError: that cannot be; names the place.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, timedelta):
        return f"{round(value.total_seconds() * 1000)}ms"
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise NotServedError(
        f"{where} is a {type(value).__name__}, which cannot be told to the process that reads the store for process "
        f"{os.getpid()} (it was forked from one that had read from a store, and the store's client does not survive "
        f"that); give text and numbers, or {CURES}"
    )
