# SPDX-License-Identifier: Apache-2.0
"""The events of an elastic run's control plane: workers that joined or were lost, and why the run waited.

The launcher appends them to `control.jsonl` in the log directory, one JSON object a line, with `kind` and `at_s`
(seconds since the run began). A line that is cut off or is no event is skipped: this file explains the run, and totals
come from the workers' own logs.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.printable import visible
from paceline.observe.reports.events import parse_lines

CONTROL_LOG = "control.jsonl"


@dataclass(frozen=True)
class ControlEvent:
    """An event of the run as a whole.

    Attributes:
        at_s: seconds since the run began.
        kind: joined, lost, left, generation, paused, resumed, called, stuck, and others.
        facts: all other fields.
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
    """The state of the run after some of its events.

    Attributes:
        generation: its number, 0 before the first.
        members: of it.
        most: workers that may be members; None where that is not known.
        workers: event -> workers so far that joined, were lost, left (which is that they finished), or left early.
        paused: why the run waits; "" where it does not.
        held: workers that wait until they are worth it.
    """

    generation: int = 0
    members: int = 0
    most: int | None = None
    workers: Counter[str] = field(default_factory=Counter)
    paused: str = ""
    held: int = 0

    def add(self, event: ControlEvent) -> None:
        """Update the state; raises an error where a field is missing or invalid."""
        if event.kind == "began":
            self.most, self.held = int(event.facts["most"]) or None, 0
        elif event.kind in ("joined", "lost", "left", "left early"):
            int(event.facts["worker"])
            self.workers[event.kind] += 1
        elif event.kind == "generation":
            self.generation, self.members = int(event.facts["number"]), len(event.facts["members"])
        elif event.kind in ("paused", "resumed"):
            self.paused = str(event.facts.get("reason", "")) if event.kind == "paused" else ""
        elif event.kind == "held":
            self.held = int(event.facts["workers"])

    @property
    def text(self) -> str:
        """`4 of at most 8 workers | generation 3 | joined 5 | lost 1`; `2 of 8 workers train; 6 wait ..` if some do."""
        most = "" if self.most is None else f" of at most {self.most}"
        parts = [f"{self.members}{most} worker{'' if self.members == 1 and not most else 's'}"]
        if self.held:
            verbs = "train" if self.members > 1 else "trains", "wait" if self.held > 1 else "waits"
            there = self.members + self.held
            them = "they are" if self.held > 1 else "it is"
            parts = [f"{self.members} of {there} workers {verbs[0]}; {self.held} {verbs[1]} until {them} worth it"]
        parts += [f"generation {self.generation}"] if self.generation else []
        shown = ("joined", "lost", "left early") if self.workers["left early"] else ("joined", "lost")
        parts += [f"{kind} {self.workers[kind]}" for kind in shown]
        return " | ".join([*parts, f"waits: {self.paused}"] if self.paused else parts)


FLIGHT = frozenset({"tape", "program", "data", "exchange", "accused"})
"""Events of the tape of a run for a replay, which earlier versions wrote."""
QUIET = frozenset({"began", "holds", "held", "called", "finished", "process started"}) | FLIGHT
"""Events that help only to debug paceline itself."""


def is_news(kind: str, facts: Mapping[str, Any], before: ElasticStatus) -> bool:
    """Whether to show an event to people, given the state of the run before it."""
    if kind in QUIET or (kind == "process ended" and not facts.get("code")):
        return False
    if kind in ("paused", "resumed"):  # slow starts are no news, nor workers that come after the end
        return before.generation > 0 and not before.workers["left"]
    return not (kind == "refused" and before.workers["left"])


def read_events(directory: Path) -> list[ControlEvent]:
    """All events in the log directory of an elastic run; none for other runs."""
    path = directory / CONTROL_LOG
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        return []
    return list(valid_events(parse_lines(data.split(b"\n"))))


def valid_events(rows: Iterable[Mapping[str, Any]]) -> Iterator[ControlEvent]:
    """Control events from JSON; other rows are skipped."""
    for row in rows:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            facts = dict(row)
            event = ControlEvent(float(facts.pop("at_s", 0.0)), str(facts.pop("kind")), facts)
            ElasticStatus().add(event)  # raises for invalid fields
            yield event


TEXTS = {
    "joined": "{who} has joined",
    "lost": "{who} was lost: {reason}",
    "left": "{who} has finished",
    "left early": "{who} has left in order; what it trained is in the model",
    "leaving": "the workers of this host leave in order, within {seconds} s: {reason}",
    "returning": "the workers of this host take part again",
    "back": "{who} is back after a restart of the launcher",
    "generation": "generation {number}: {count} workers ({members}): {reason}",
    "paused": "the run waits: {reason}",
    "ended": "the run was given up: {reason}",
    "resumed": "the run goes on",
    "called": "{who} is called to exchange {exchange}",
    "held": "{workers} workers wait until they are worth it",
    "grown": "{wanted} workers are to train instead of {before}: {reason}",
    "holds": "{who} holds the state of exchange {exchange}",
    "process ended": "the process at place {place} ended: {code}",
    "stuck": "exchange {exchange} waits for {waited_s} s: {activities}",
    "refused": "refused {peer}: {reason}",
    "revoked": "certificates were revoked: {reason}",
    "record": "{path} cannot be written ({reason}): the run goes on, and a launcher that dies has no successor",
}
TEXTS["launcher record"] = TEXTS["record"]


def event_text(kind: str, facts: Mapping[str, Any]) -> str:
    """One event in words."""
    if kind not in TEXTS:
        rest = ", ".join(f"{name} {value}" for name, value in facts.items())
        return visible(f"{kind}: {rest}" if rest else kind)
    members, code = facts.get("members") or [], facts.get("code")
    words: dict[str, Any] = {"peer": "an unknown peer"} | dict(facts)
    words["who"] = f"worker {facts.get('worker', '?')}" + (f" on {facts['host']}" if facts.get("host") else "")
    words["reason"] = str(facts.get("why") or facts.get("reason") or "").rstrip(".")
    words["code"] = f"killed by signal {-code}" if isinstance(code, int) and code < 0 else f"exit code {code}"
    if kind == "generation":
        words |= {"count": len(members), "members": ", ".join(str(member[0]) for member in members)}
    if kind == "stuck":
        words["activities"] = _activities(facts.get("workers") or [])
    return visible(TEXTS[kind].format_map(defaultdict(lambda: None, words)))


def _activities(workers: Iterable[Any]) -> str:
    """What each worker does meanwhile."""
    rows = [row for row in workers if isinstance(row, Mapping)]
    return "; ".join(f"worker {row.get('worker')}: {row.get('doing') or 'silent'}" for row in rows)
