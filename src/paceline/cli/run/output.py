# SPDX-License-Identifier: Apache-2.0
"""The workers' output, line by line, each with its rank in front; what paceline writes there is counted instead."""

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

from paceline.cli.launch.messages import Messages
from paceline.cli.run.tracebacks import HeldTracebacks
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

    def __init__(self, show: Show, clock: Callable[[], float] = time.monotonic) -> None:
        self.show, self.messages = show, Messages()
        self.tails: list[Tail] = []
        self._first = MOST_RANK
        self._held = HeldTracebacks(clock)
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
            self._show(tail, tail.finish())
            self.tails.remove(tail)
        self._print(rank, self._held.release(rank), True)

    def read(self) -> None:
        """Show new lines."""
        for tail in self.tails:
            self._show(tail, tail.read())
        for rank in self._held.due():
            self._print(rank, self._held.release(rank), True)

    def finish(self, failed: bool = False) -> None:
        """Show all remaining lines; of a run that has `failed`, no tracebacks: a panel has the first worker's."""
        for tail in self.tails:
            self._show(tail, tail.finish())
        for rank in () if failed else sorted({tail.rank for tail in self.tails}):
            self._print(rank, self._held.release(rank), True)

    def _show(self, tail: Tail, lines: Iterable[str]) -> None:
        lines = list(lines)
        if not tail.is_error and lines:  # the program goes on after a traceback that it printed
            self._print(tail.rank, self._held.release(tail.rank), True)
        self._print(tail.rank, self._held.rest(tail.rank, lines) if tail.is_error else lines, tail.is_error)

    def _print(self, rank: int, lines: Iterable[str], is_error: bool) -> None:
        if self.mute_errors and is_error:
            return
        for line in lines:
            text = self.messages.shown(rank, line, is_error)
            if text or not line:
                self.show(rank, text, is_error)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def shower(console: Console, rank_0_only: bool = False, names: Mapping[int, str] = EACH_RANK) -> Show:
    """Prints lines with the rank, or its name, in front, or rank 0's alone and unchanged.

    On a terminal they scroll above a status line; into a pipe or a file they go as they are.
    """

    def show(rank: int, line: str, is_error: bool) -> None:
        front = "" if rank_0_only else f"[{names.get(rank, rank)}] "
        if rank_0_only and rank:
            return
        if console.is_terminal:
            text = Text.from_ansi(coloured(line))
            console.print(Text.assemble((front, COLOURS[rank % len(COLOURS)]), text), soft_wrap=True)
            return
        stream = sys.stderr if is_error else sys.stdout
        print(front + (coloured(line) if stream.isatty() else line), file=stream, flush=True)

    return show


def decode(line: bytes, rank: int) -> str:
    """The text of a line; the last state of a progress bar.

    Removes `[rank3]: `, which torch puts before the lines of a traceback.
    """
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1].removeprefix(f"[rank{rank}]: ")


MIN_FREE_BYTES = 1 << 14


def missing(directory: Path) -> str:
    """Why a log directory does not take any more; "" if it does."""
    try:
        disk = os.statvfs(directory)
    except FileNotFoundError:
        return "was removed"
    except OSError:
        return ""
    full = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES
    return "is on a full disk" if full else ""
