# SPDX-License-Identifier: Apache-2.0
"""The near ends of the connections to the hosts: messages to each and from all, and whose connection was lost."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from paceline.cli.launch.signals import SignalListener
from paceline_plugins.ssh import client
from paceline_plugins.ssh.far_end import MAGIC
from paceline_plugins.ssh.hosts import Host

SILENCE_S = 20.0
"""A host from which nothing came for so long is lost; its far end sends something every two seconds."""
PING_S = 2.0
LOOK_S = 0.05
MOST_BANNER_LINES = 1000
ERROR_BYTES = 8192


class Stopped(Exception):
    """The user ended the command."""


@dataclass(frozen=True)
class Message:
    """What a host said."""

    host: int  # its index
    kind: str  # of the message; "closed" once the connection has ended
    facts: Mapping[str, Any]  # its keys
    data: bytes = b""  # its bytes


class Link:
    """One host's connection. A thread reads, one writes, and one collects what ssh says.

    Args:
        index: of the host.
        host: the host.
        is_here: whether it is this machine, which needs no ssh.
        inbox: takes the messages of all hosts.
    """

    def __init__(self, index: int, host: Host, is_here: bool, inbox: queue.Queue[Message]) -> None:
        self.index, self.host, self.is_here, self.inbox = index, host, is_here, inbox
        source = client.source()
        command = client.local_command(source) if is_here else client.command(host, source)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this command alone
        )
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        self.heard_at = time.monotonic()
        self.closed = False
        self.errors = b""
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._outbox.put(source.encode())
        targets = ((self._write, self.process.stdin), (self._read, self.process.stdout),
                   (self._collect, self.process.stderr))  # fmt: skip
        self._threads = [threading.Thread(target=do, args=(pipe,), daemon=True) for do, pipe in targets]
        for thread in self._threads:
            thread.start()

    def send(self, kind: str, data: bytes = b"", **facts: Any) -> None:
        """Never waits."""
        self._outbox.put(json.dumps({**facts, "kind": kind, "bytes": len(data)}).encode() + b"\n" + data)

    def _write(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (data := self._outbox.get()) is not None:
                pipe.write(data)
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()

    def _read(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            banner = 0
            while (line := pipe.readline()) and line.strip() != MAGIC.encode() and banner < MOST_BANNER_LINES:
                banner += 1
            while line := pipe.readline():
                facts = json.loads(line)
                data = pipe.read(facts["bytes"])
                self.heard_at = time.monotonic()
                self.inbox.put(Message(self.index, facts["kind"], facts, data))
        self.inbox.put(Message(self.index, "closed", {}))

    def _collect(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := pipe.readline():
                self.errors = (self.errors + data)[-ERROR_BYTES:]

    def why(self) -> str:
        """Why it closed, or did not answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._threads[2].join(1.0)
        return client.meaning(self.host, self.errors.decode(errors="replace"), self.process.poll())

    def close(self, within_s: float) -> None:
        """End the connection: the far end sees the end of its input; after a time ssh is killed."""
        self._outbox.put(None)
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(within_s)
        for thread in self._threads:
            thread.join(1.0)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


@dataclass
class Links:
    """All hosts' connections."""

    hosts: Sequence[Host]  # in the order of their ranks
    listener: SignalListener  # of this command's signals
    links: list[Link] = field(default_factory=list)  # one for each host
    inbox: queue.Queue[Message] = field(default_factory=queue.Queue)
    troubles: dict[int, list[str]] = field(default_factory=dict)  # what is wrong with hosts, by index
    _pinged_at: float = 0.0

    def open(self) -> None:
        """Connect to all at once."""
        for index, host in enumerate(self.hosts):
            self.links.append(Link(index, host, client.is_here(host), self.inbox))

    def close(self, within_s: float = 5.0) -> None:
        """End all connections."""
        for link in self.links:
            link._outbox.put(None)
        until = time.monotonic() + within_s
        for link in self.links:
            link.close(max(0.1, until - time.monotonic()))

    def trouble(self, host: int, text: str) -> None:
        """Note what is wrong with a host."""
        self.troubles.setdefault(host, []).append(text)

    @property
    def well(self) -> list[int]:
        """Hosts without trouble."""
        return [index for index in range(len(self.hosts)) if index not in self.troubles]

    def next(self, within_s: float = LOOK_S) -> Message | None:
        """The next message of any host; keeps the connections alive meanwhile."""
        now = time.monotonic()
        if now - self._pinged_at > PING_S:
            self._pinged_at = now
            for link in self.links:
                link.send("ping")
        try:
            message = self.inbox.get(timeout=within_s)
        except queue.Empty:
            return None
        if message.kind == "closed":
            self.links[message.host].closed = True
        return message

    def ask(self, kind: str, of: Mapping[int, Mapping[str, Any]], within_s: float) -> dict[int, Mapping[str, Any]]:
        """Ask hosts a question each, at the same time; those that do not answer get a trouble.

        Args:
            kind: of the question.
            of: its facts for each host; its key `data` is sent as bytes.
            within_s: deadline for all.
        """
        for host, facts in of.items():
            self.links[host].send(kind, **facts)
        return self.wait_for("answer", list(of), within_s)

    def wait_for(self, kind: str, hosts: Sequence[int], within_s: float) -> dict[int, Mapping[str, Any]]:
        """The messages of a kind of these hosts."""
        found: dict[int, Mapping[str, Any]] = {}
        until = time.monotonic() + within_s
        waits = {host for host in hosts if not self.links[host].closed}
        for host in set(hosts) - waits:
            self.trouble(host, self.links[host].why())
        while waits and time.monotonic() < until:
            if self.listener.received:
                raise Stopped
            message = self.next()
            if message is None or message.host not in waits:
                continue
            if message.kind == kind:
                found[message.host] = message.facts
                waits.discard(message.host)
            elif message.kind == "closed":
                self.trouble(message.host, self.links[message.host].why())
                waits.discard(message.host)
        for host in sorted(waits):
            said = self.links[host].errors.decode(errors="replace").strip()
            self.trouble(host, f"it has not answered within {within_s:g} s" + (f": {said[-200:]}" if said else ""))
        return found
