# SPDX-License-Identifier: Apache-2.0
"""A control plane and workers in one process, for the tests of what goes over sockets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.communication.sockets.channel import TLS
from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Generation, Terms
from paceline.flow.control.server import ControlServer

HERE = "127.0.0.1"
SOON = 30.0
"""Seconds that nothing in a test takes unless it is broken."""


class Log:
    """What the control plane told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._changed = threading.Condition()

    def __call__(self, kind: str, about: dict[str, Any]) -> None:
        with self._changed:
            self.events.append((kind, about))
            self._changed.notify_all()

    def wait(self, kind: str, **have: Any) -> dict[str, Any]:
        """The first such event, when it is there."""

        def found() -> dict[str, Any] | None:
            for one, about in self.events:
                if one == kind and all(about.get(name) == value for name, value in have.items()):
                    return about
            return None

        with self._changed:
            event = self._changed.wait_for(found, SOON)
        assert event is not None, f"no {kind} {have} in {self.events}"
        return event

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All such events."""
        return [about for one, about in self.events if one == kind]


@contextlib.contextmanager
def control(
    terms: Terms, record: Path | None = None, tls: TLS | None = None, port: int = 0, log: Log | None = None
) -> Iterator[tuple[ControlServer, Log]]:
    """A server that takes workers."""
    log = log or Log()
    server = ControlServer(HERE, port, tls, terms, record, log)
    server.start()
    try:
        yield server, log
    finally:
        server.close()


def member(port: int, tls: TLS | None = None, timeout_s: float = SOON, **fingerprint: Any) -> ControlClient:
    """A worker that has said hello."""
    return ControlClient(HERE, port, About("host", HERE, 1, fingerprint or {"rule": "block"}), tls, timeout_s)


def begin(one: ControlClient) -> Generation:
    """It becomes a member that holds the state."""
    generation = one.enter()
    one.holds_state(generation.number)
    return generation


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, each in a thread of its own."""
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(results) == len(calls), "a call did not return"
    for one in results.values():
        if isinstance(one, BaseException):
            raise one
    return [results[number] for number in range(len(calls))]


def work(one: ControlClient, places: int, done: Callable[[], None] = lambda: None) -> list[Mark]:
    """A worker's whole program, as it should be: one epoch of leases, an exchange after each; what it committed."""
    generation, merged, held, holds = one.enter(), list[Mark](), list[Mark](), False
    while True:
        if one.worker not in generation.newcomers:
            holds = True
        elif not holds or generation.restored:
            one.holds_state(generation.number)
            holds = True
        if not held and one.called <= generation.exchange:
            kind, mark = one.ask(Question(0, 0, places, 1, 2, dry=True))
            if kind == "over":
                return merged
            if mark is not None:
                held.append(mark)
            elif one.called <= generation.exchange:
                one.wait_news(SOON)
        one.starts(generation.exchange + 1)
        verdict = one.commit(generation.number, generation.exchange + 1, held, {})
        if verdict.committed:
            merged, held = merged + held, []
            done()
        elif one.worker in verdict.generation.newcomers:
            holds = False
        generation = verdict.generation


def wait_for(what: Callable[[], Any]) -> Any:
    """What it gives, once that is true."""
    end = time.monotonic() + SOON
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found
