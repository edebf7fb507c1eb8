# SPDX-License-Identifier: Apache-2.0
"""Follow the launchers of all hosts to their end: their files, their output, signals, and hosts that are lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cli.console import err
from paceline.cli.launch.messages import Messages
from paceline.cli.run import output
from paceline.cli.run.failure import LOST
from paceline_plugins.ssh import words
from paceline_plugins.ssh.far_end import STOP_S
from paceline_plugins.ssh.link import SILENCE_S, Links, Message

SPREAD_S = 6.0
"""When one host has failed, the launchers of the other ones get so long to notice it; then they are told."""
KILL_S = STOP_S + 3.0
"""After the request to stop a launcher is killed; after twice this time its host is given up."""
LOOK_S = 0.2
_SAFE = re.compile(r"(?:(?!\.{1,2}/)[\w.][\w.@ -]*/)*(?!\.{1,2}$)[\w.][\w.@ -]*")
_WORKER = re.compile(r"(?:rank|place)-(\d+)(?:\.(\d+))?\.err")
_PLACE = re.compile(r"output/place-(\d+)")
_OF_LAUNCHER = re.compile(r"\[\d+\] ")
_KEPT = re.compile(r"output/|rank-")
"""Of an elastic run's other hosts: their launchers' own records would replace those of the first host."""


@dataclass
class Ended:
    """How the launchers ended."""

    codes: dict[int, int] = field(default_factory=dict)  # exit code by host
    # hosts whose connection was lost, and why, in the order in which it was noticed
    lost: dict[int, str] = field(default_factory=dict)
    first: int | None = None  # the host that failed first, if any
    messages: Messages = field(default_factory=Messages)  # of the workers

    def bad(self, host: int) -> None:
        """Note a host that failed."""
        self.first = host if self.first is None else self.first


class Mirror:
    """Writes the files of the other hosts into the log directory.

    In an elastic run every host counts its places from 0. Here they are numbered over all hosts.

    Args:
        directory: of the logs.
        places: the first place of each host of an elastic run; empty in other runs.
    """

    def __init__(self, directory: Path, places: Sequence[int] = ()) -> None:
        self.directory, self.places = directory, places
        self._broken = set[Path]()  # files that lack a piece

    def write(self, facts: Mapping[str, Any], data: bytes, host: int = 0) -> None:
        """Write a piece; refuses a path that leads out of the directory."""
        name, offset = str(facts["path"]), int(facts["offset"])
        if not _SAFE.fullmatch(name) or offset < 0:
            raise ValueError(f"it sent a file with the name {name!r}, which no run has")
        if self.places and host:
            if not _KEPT.match(name):
                return
            name = _PLACE.sub(lambda found: f"output/place-{int(found[1]) + self.places[host]:03d}", name)
        path = self.directory / name
        if offset and path in self._broken:
            return  # without the piece before it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if offset else "wb") as file:
                file.seek(offset)
                file.write(data)
            self._broken.discard(path)
        except OSError as error:
            if not self._broken:
                err().print(
                    f"the hosts' logs cannot be written here ({error}): the run continues, and they are incomplete",
                    soft_wrap=True,
                )
            self._broken.add(path)


class Output:
    """Shows the output of every rank whose files appear in the log directory, also after a restart.

    Args:
        folder: of the output.
        show: prints a worker's line.
        launcher: file of a launcher whose own words are shown as well, or None.
    """

    def __init__(self, folder: Path, show: output.Show, launcher: Path | None = None) -> None:
        self.folder, self.tails = folder, output.Tails(show)
        self._turn: dict[int, int] = {}
        self._launcher = None if launcher is None else output.Tail(launcher, words.FIRST, True)

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line.strip() and not _OF_LAUNCHER.match(line):  # those of workers come from their own files
                self.tails.show(words.FIRST, line, True)

    def look(self) -> None:
        """Show what is new."""
        for rank, (turn, path) in sorted(worker_files(self.folder).items()):
            if self._turn.get(rank) != turn:
                self.tails.drop(rank)
                self._turn[rank] = turn
                self.tails.follow(rank, path.with_suffix(".out"), path)
        self.tails.read()
        if self._launcher is not None:
            self._say(self._launcher.read())

    def finish(self) -> None:
        """Show the rest."""
        self.look()
        self.tails.finish()
        if self._launcher is not None:
            self._say(self._launcher.finish())


def worker_files(folder: Path) -> dict[int, tuple[int, Path]]:
    """The last start of each rank, and the file of its stderr."""
    found: dict[int, tuple[int, Path]] = {}
    for path in folder.glob("*.err"):
        match = _WORKER.fullmatch(path.name)
        if match is not None:
            turn = (int(match[2] or 1), path)
            found[int(match[1])] = max(found.get(int(match[1]), turn), turn)
    return found


class Follower:
    """The run from its start to its end.

    Args:
        links: to the hosts, whose launchers run.
        directory: of the logs, here.
        show: prints a worker's line.
        elastic: whether the run goes on without a host, unless it is the first.
        clock: seconds.
    """

    def __init__(
        self,
        links: Links,
        directory: Path,
        show: output.Show,
        elastic: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links, self.elastic, self.clock, self.show = links, elastic, clock, show
        counts = [host.workers or 1 for host in links.hosts]
        places = [sum(counts[:index]) for index in range(len(counts))] if elastic else []
        launcher = directory / "output" / f"{words.said_by(0)}.launcher" if elastic else None
        self.mirror, self.output = Mirror(directory, places), Output(directory / "output", show, launcher)
        self.ended = Ended(messages=self.output.tails.messages)
        self._forwarded = 0
        self._stop_at = self._kill_at = float("inf")

    @property
    def running(self) -> list[int]:
        """Hosts whose launcher has not ended."""
        return [index for index in range(len(self.links.hosts)) if index not in self.ended.codes | self.ended.lost]

    def run(self) -> Ended:
        """Until all launchers have ended, or their hosts are given up."""
        look_at = 0.0
        while self.running:
            message = self.links.next()
            if message is not None:
                self.take(message)
            self._look_for_silence()
            self._forward_signals()
            self._stop_late()
            if self.clock() >= look_at:
                look_at = self.clock() + LOOK_S
                self.output.look()
        self.output.finish()
        return self.ended

    def take(self, message: Message) -> None:
        """What a host said."""
        if message.kind == "file":
            try:
                self.mirror.write(message.facts, message.data, message.host)
            except ValueError as error:
                self._lose(message.host, str(error))
        elif message.kind == "ended":
            code = int(message.facts["code"])
            self.ended.codes[message.host] = 128 - code if code < 0 else code
            if code not in (0, LOST):
                self._failed(message.host)
        elif message.kind == "closed" and message.host in self.running:
            self._lose(message.host, self.links.links[message.host].why())

    def _look_for_silence(self) -> None:
        for index in self.running:
            if time.monotonic() - self.links.links[index].heard_at > SILENCE_S:
                self._lose(index, f"nothing came from it for {SILENCE_S:g} s: is it off, or its link cut?")

    def _lose(self, host: int, why: str) -> None:
        self.ended.lost[host] = why
        if self.elastic and host:
            self.show(
                words.FIRST, f"{self.links.hosts[host].name} is lost, and the run goes on without it: {why}", True
            )
        self._failed(host, now=True)

    def _failed(self, host: int, now: bool = False) -> None:
        """The run cannot go on: the other hosts are to end, too; an elastic one only without its first host."""
        if self.elastic and host:
            return
        self.ended.bad(host)
        self._stop_at = min(self._stop_at, self.clock() + (0.0 if now else SPREAD_S))

    def _forward_signals(self) -> None:
        received = self.links.listener.received
        for number in received[self._forwarded :]:
            self.output.tails.mute_errors = True  # N tracebacks of KeyboardInterrupt say nothing new
            self._tell(number)
            self._kill_at = min(self._kill_at, self.clock() + KILL_S)
        self._forwarded = len(received)

    def _stop_late(self) -> None:
        """Stop, kill and give up launchers whose time is over."""
        if self.clock() >= self._stop_at:
            self._stop_at = float("inf")
            self._tell(signal.SIGTERM)
            self._kill_at = min(self._kill_at, self.clock() + KILL_S)
        if self.clock() >= self._kill_at + KILL_S:
            for index in self.running:
                self.ended.lost[index] = "its launcher did not end, although it was killed"
        elif self.clock() >= self._kill_at:
            self._tell(signal.SIGKILL)

    def _tell(self, number: int) -> None:
        for index in self.running:
            self.links.links[index].send("signal", number=int(number))


def follow(links: Links, directory: Path, show: output.Show, elastic: bool = False) -> Ended:
    """Show what all workers print, until the last launcher has ended."""
    return Follower(links, directory, show, elastic).run()
