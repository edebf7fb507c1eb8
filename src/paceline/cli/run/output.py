# SPDX-License-Identifier: Apache-2.0
"""The workers' output, line by line, each with its rank in front."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from paceline.cli.console import err, near
from paceline.cli.run.tracebacks import Repeats
from paceline.observe.printable import coloured

CHUNK_BYTES = 1 << 18  # a poll, so that one verbose worker does not starve the other ones
MOST_RANK = 1 << 30
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_black")

EACH_RANK: Mapping[int, str] = {}
"""No names for ranks: their numbers."""
Show = Callable[[int, str, bool], None]  # rank, line, whether it came from stderr


@dataclass
class Tail:
    """Follows one growing file."""

    path: Path
    rank: int
    is_error: bool
    offset: int = 0
    rest: bytes = b""
    bars: bool = True  # whether lines that were written over, as progress bars are, are shown

    file: IO[bytes] | None = None  # kept open, so that a removed file is still read

    def read(self) -> list[str]:
        """The lines that were completed since the last call."""
        data = b""
        with contextlib.suppress(OSError):
            self.file = self.file or self.path.open("rb")
            self.file.seek(self.offset)
            data = self.file.read(CHUNK_BYTES)
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [decode(line, self.rank) for line in lines if self.bars or b"\r" not in line.rstrip(b"\r")]

    def finish(self) -> list[str]:
        """All remaining lines, including an incomplete last one."""
        lines, before = self.read(), -1
        while self.offset > before:
            before = self.offset
            lines += self.read()
        if self.file is not None:
            self.file.close()
            self.file = None
        if self.rest and (self.bars or b"\r" not in self.rest.rstrip(b"\r")):
            lines.append(decode(self.rest, self.rank))
        self.rest = b""
        return lines


class Tails:
    """Follows every worker's output. Progress bars are shown of the first worker of this host only."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.tails: list[Tail] = []
        self._first = MOST_RANK
        self._repeats = Repeats()
        self.mute_errors = False  # stderr then goes to its file only

    def __len__(self) -> int:
        return len(self.tails) // 2  # two a worker

    def follow(self, rank: int, stdout: Path, stderr: Path, *, from_now: bool = False) -> None:
        """Add a worker; `from_now` skips its earlier output."""
        for path, is_error in ((stdout, False), (stderr, True)):
            self._first = min(self._first, rank)
            offset = _size(path) if from_now else 0
            self.tails.append(Tail(path, rank, is_error, offset, bars=rank == self._first))

    def drop(self, rank: int) -> None:
        """Show the remaining output of a worker that ended, and stop following it."""
        for tail in [tail for tail in self.tails if tail.rank == rank]:
            self._end(tail)
            self.tails.remove(tail)

    def read(self) -> None:
        """Show new lines."""
        for tail in self.tails:
            self._show(tail, tail.read())

    def finish(self) -> None:
        """Show all remaining lines."""
        for tail in self.tails:
            self._end(tail)

    def _end(self, tail: Tail) -> None:
        self._show(tail, tail.finish())
        for line in self._repeats.rest(tail.rank) if tail.is_error and not self.mute_errors else ():
            self.show(tail.rank, line, True)

    def _show(self, tail: Tail, lines: Iterable[str]) -> None:
        if self.mute_errors and tail.is_error:
            return
        for line in self._repeats.pass_on(tail.rank, list(lines)) if tail.is_error else lines:
            self.show(tail.rank, line, tail.is_error)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def prefixed(rank: int, line: str, is_error: bool) -> None:
    """Print with the rank in front, without colour, for pipes and files."""
    _print(f"[{rank}] {line}", is_error)


def prefixed_by(names: Mapping[int, str]) -> Show:
    """The same with names of ranks."""
    return lambda rank, line, is_error: _print(f"[{names.get(rank, rank)}] {line}", is_error)


def rank_0(rank: int, line: str, is_error: bool) -> None:
    """Print rank 0's lines unchanged, and no other's."""
    if rank == 0:
        _print(line, is_error)


def _print(line: str, is_error: bool) -> None:
    stream = sys.stderr if is_error else sys.stdout
    print(coloured(line) if stream.isatty() else line, file=stream, flush=True)


def rank_0_on_terminal(console: Console) -> Show:
    """The same on a terminal."""

    def show(rank: int, line: str, is_error: bool) -> None:
        if rank == 0:
            console.print(Text.from_ansi(coloured(line)), soft_wrap=True)

    return show


def prefixed_on_terminal(console: Console, names: Mapping[int, str] = EACH_RANK) -> Show:
    """Print with a coloured rank, or its name, in front; the lines scroll above a status line."""

    def show(rank: int, line: str, is_error: bool) -> None:
        prefix = (f"[{names.get(rank, rank)}] ", COLOURS[rank % len(COLOURS)])
        console.print(Text.assemble(prefix, Text.from_ansi(coloured(line))), soft_wrap=True)

    return show


def decode(line: bytes, rank: int) -> str:
    """The text of a line; the last state of a progress bar.

    Removes `[rank3]: `, which torch puts before the lines of a traceback.
    """
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1].removeprefix(f"[rank{rank}]: ")


LOOK_EVERY_S = 5.0
MIN_FREE_BYTES = 1 << 14


class DiskWatcher:
    """Warns once if the log directory is on a full disk, or was removed."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self._clock = directory, clock
        self._looked_at, self._said = float("-inf"), False

    def look(self) -> None:
        """Check, at most every `LOOK_EVERY_S`."""
        now = self._clock()
        if self._said or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        what = _missing(self.directory)
        if what:
            self._said = True
            err().print(
                f"the log directory {near(self.directory)} {what}: the run continues with incomplete logs",
                markup=False,
                soft_wrap=True,
            )


def _missing(directory: Path) -> str:
    try:
        disk = os.statvfs(directory)
    except FileNotFoundError:
        return "was removed"
    except OSError:
        return ""
    full = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES
    return "is on a full disk" if full else ""
