# SPDX-License-Identifier: Apache-2.0
"""The events of an elastic run's control plane: who came, who was lost and why, and what the run waited for.

The launcher appends them to `control.jsonl` in the log directory, one JSON object a line, with `kind` and `at_s`
(seconds since the run began). A line that is cut off, or is no event, is passed over: this file tells a story, and the
workers' own logs count.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.printable import deeply, visible

NAME = "control.jsonl"


@dataclass(frozen=True)
class ControlEvent:
    """Something that happened to the run as a whole.

    Attributes:
        at_s: seconds since the run began.
        kind: joined, lost, left, generation, paused, resumed, called, stuck, and others.
        facts: all else.
    """

    at_s: float
    kind: str
    facts: dict[str, Any]

    @property
    def text(self) -> str:
        """For people."""
        return event_text(self.kind, self.facts)


@dataclass
class ElasticStatus:
    """How the run stands, after some of its events.

    Attributes:
        generation: its number, 0 before the first.
        members: of it.
        most: workers that may be members; None where that is not known.
        joined, lost, left: workers so far; left are those that came to their end.
        paused: why the run waits; "" where it does not.
    """

    generation: int = 0
    members: int = 0
    most: int | None = None
    joined: int = 0
    lost: int = 0
    left: int = 0
    paused: str = ""

    def add(self, event: ControlEvent) -> None:
        """One more event."""
        if event.kind == "began":
            self.most = int(event.facts["most"]) or None
        elif event.kind in ("joined", "lost", "left"):
            int(event.facts["worker"])
            setattr(self, event.kind, getattr(self, event.kind) + 1)
        elif event.kind == "generation":
            self.generation, self.members = int(event.facts["number"]), len(event.facts["members"])
        elif event.kind in ("paused", "resumed"):
            self.paused = str(event.facts.get("reason", "")) if event.kind == "paused" else ""

    @property
    def text(self) -> str:
        """`4 of at most 8 workers | generation 3 | joined 5 | lost 1`."""
        most = "" if self.most is None else f" of at most {self.most}"
        parts = [f"{self.members}{most} worker{'' if self.members == 1 and not most else 's'}"]
        parts += [f"generation {self.generation}"] if self.generation else []
        parts += [f"joined {self.joined}", f"lost {self.lost}"]
        return " | ".join([*parts, f"waits: {self.paused}"] if self.paused else parts)


QUIET = frozenset({"began", "holds", "called", "finished", "process started"})
"""Events that only help to find what is wrong with paceline itself."""


def is_news(kind: str, facts: Mapping[str, Any], before: ElasticStatus) -> bool:
    """Whether an event is news for people, in a run that stood so before it."""
    if kind in QUIET or (kind == "process ended" and not facts.get("code")):
        return False
    if kind in ("paused", "resumed"):  # that workers take their time to begin is no news, nor who comes after the end
        return before.generation > 0 and not before.left
    return not (kind == "refused" and before.left)


def news_events(events: Iterable[ControlEvent], debug: bool = False) -> list[ControlEvent]:
    """What people want to hear of; with `debug` everything."""
    elastic_status, told = ElasticStatus(), []
    for event in events:
        if debug or is_news(event.kind, event.facts, elastic_status):
            told.append(event)
        elastic_status.add(event)
    return told


def read_events(directory: Path) -> list[ControlEvent]:
    """What stands in the log directory of an elastic run; nothing for other runs."""
    path = directory / NAME
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        return []
    return list(parse(data.split(b"\n")))


def parse(lines: Iterable[bytes]) -> Iterable[ControlEvent]:
    """The events on some lines; what is none is passed over."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            yield from events([deeply(json.loads(line))])


def events(rows: Iterable[Any]) -> Iterable[ControlEvent]:
    """The events that some JSON stands for; what is none is passed over."""
    for row in rows:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            said = dict(row)
            event = ControlEvent(float(said.pop("at_s", 0.0)), str(said.pop("kind")), said)
            ElasticStatus().add(event)  # what has no sense is found here
            yield event


def event_text(kind: str, facts: Mapping[str, Any]) -> str:
    """One event in words."""
    return visible(_event_text(kind, facts))


def _event_text(kind: str, facts: Mapping[str, Any]) -> str:
    who = f"worker {facts.get('worker', '?')}" + (f" on {facts['host']}" if facts.get("host") else "")
    why = str(facts.get("why") or facts.get("reason") or "").rstrip(".")
    if kind == "joined":
        return f"{who} has joined"
    if kind == "lost":
        return f"{who} was lost: {why}"
    if kind == "left":
        return f"{who} has come to its end"
    if kind == "back":
        return f"{who} is back after a restart of the launcher"
    if kind == "generation":
        members = facts.get("members") or []
        numbers = ", ".join(str(member[0]) for member in members)
        return f"generation {facts.get('number')}: {len(members)} workers ({numbers}): {why}"
    if kind == "paused":
        return f"the run waits: {why}"
    if kind == "ended":
        return f"the run was given up: {why}"
    if kind == "resumed":
        return "the run goes on"
    if kind == "called":
        return f"{who} is called to exchange {facts.get('exchange')}"
    if kind == "holds":
        return f"{who} holds the state of exchange {facts.get('exchange')}"
    if kind == "process ended":
        return f"the process at place {facts.get('place')} ended: {_ended(facts.get('code'))}"
    if kind == "stuck":
        return _stuck(facts)
    if kind == "refused":
        return f"refused {facts.get('peer', 'somebody')}: {why}"
    if kind in ("record", "launcher record"):
        return (
            f"{facts.get('path')} cannot be written ({why}): the run goes on, and a launcher that dies has no successor"
        )
    rest = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"{kind}: {rest}" if rest else kind


def _ended(code: Any) -> str:
    return f"killed by signal {-code}" if isinstance(code, int) and code < 0 else f"exit code {code}"


def _stuck(facts: Mapping[str, Any]) -> str:
    """Who waits for whom."""
    rows = [row for row in facts.get("workers") or [] if isinstance(row, Mapping)]
    doing = "; ".join(f"worker {row.get('worker')}: {row.get('doing') or 'silent'}" for row in rows)
    return f"exchange {facts.get('exchange')} waits for {facts.get('waited_s')} s: {doing}"
