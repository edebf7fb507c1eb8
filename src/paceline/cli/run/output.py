# SPDX-License-Identifier: Apache-2.0
"""What the workers print, line by line, each with its rank in front."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from paceline.cli.run.tracebacks import Repeats
from paceline.core.printable import coloured

CHUNK_BYTES = 1 << 18  # read at one look, so that a talkative worker cannot starve the others
COLOURS = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "bright_red",
    "bright_cyan",
    "bright_black",
)

Show = Callable[[int, str, bool], None]  # rank, line, whether it came from stderr


@dataclass
class Tail:
    """Follows one growing file."""

    path: Path
    rank: int
    is_error: bool
    offset: int = 0
    rest: bytes = b""

    file: IO[bytes] | None = None  # kept open: what a removed file still gets is read, too

    def read(self) -> list[str]:
        """The lines that were completed since the last look."""
        data = b""
        with contextlib.suppress(OSError):
            self.file = self.file or self.path.open("rb")
            self.file.seek(self.offset)
            data = self.file.read(CHUNK_BYTES)
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [decode(line, self.rank) for line in lines]

    def finish(self) -> list[str]:
        """All that is left, the unfinished last line included."""
        lines, before = self.read(), -1
        while self.offset > before:
            before = self.offset
            lines += self.read()
        if self.file is not None:
            self.file.close()
            self.file = None
        if self.rest:
            lines.append(decode(self.rest, self.rank))
            self.rest = b""
        return lines


class Tails:
    """Follows every worker's output."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.tails: list[Tail] = []
        self._repeats = Repeats()
        self.mute_errors = False  # stderr is then only kept in its file

    def __len__(self) -> int:
        return len(self.tails) // 2  # of a worker there are two

    def follow(self, rank: int, stdout: Path, stderr: Path, *, from_now: bool = False) -> None:
        """Add a worker; `from_now` passes over what it printed before."""
        for path, is_error in ((stdout, False), (stderr, True)):
            self.tails.append(Tail(path, rank, is_error, _size(path) if from_now else 0))

    def drop(self, rank: int) -> None:
        """Show all that is left of a worker that ended, and follow it no more."""
        for tail in [tail for tail in self.tails if tail.rank == rank]:
            self._end(tail)
            self.tails.remove(tail)

    def read(self) -> None:
        """Show what is new."""
        for tail in self.tails:
            self._show(tail, tail.read())

    def finish(self) -> None:
        """Show all that is left."""
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


def plain(rank: int, line: str, is_error: bool) -> None:
    """For pipes and files: no colour, stdout to stdout and stderr to stderr."""
    _print(f"[{rank}] {line}", is_error)


def first(rank: int, line: str, is_error: bool) -> None:
    """What rank 0 prints, as it prints it; the others' is in their files."""
    if rank == 0:
        _print(line, is_error)


def _print(line: str, is_error: bool) -> None:
    """Files and pipes get the program's own bytes."""
    stream = sys.stderr if is_error else sys.stdout
    print(coloured(line) if stream.isatty() else line, file=stream, flush=True)


def first_on_terminal(console: Console) -> Show:
    """The same, for a terminal."""

    def show(rank: int, line: str, is_error: bool) -> None:
        if rank == 0:
            console.print(Text.from_ansi(coloured(line)), soft_wrap=True)

    return show


def on_terminal(console: Console) -> Show:
    """For a terminal; where it has a live status line, the lines scroll above that."""

    def show(rank: int, line: str, is_error: bool) -> None:
        _coloured(console, rank, line)

    return show


def _coloured(console: Console, rank: int, line: str) -> None:
    prefix = (f"[{rank}] ", COLOURS[rank % len(COLOURS)])
    console.print(Text.assemble(prefix, Text.from_ansi(coloured(line))), soft_wrap=True)


def decode(line: bytes, rank: int) -> str:
    """Text of a line; of a progress bar that rewrote its line, the last state.

    torch puts `[rank3]: ` before the lines of a traceback, which would say the rank twice.
    """
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1].removeprefix(f"[rank{rank}]: ")
