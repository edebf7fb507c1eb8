# SPDX-License-Identifier: Apache-2.0
"""Notices of a running program: events of workers and of the control plane, as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.observe.reports.elastic_events import ControlEvent
from paceline.observe.reports.events import LONGEST_LINE, parse_lines

_QUIET = frozenset({"attach", "exchange", "value", "epoch", "cache", "close"})
NAMED = frozenset({"lost", "left_out", "tune", "takeover", "save", "resume", "rule", "error", "waiting", "damaged"})
"""Kinds of events of workers that people want to know; others are details."""
_HIDDEN = frozenset({"kind", "at_s", "rank", "text"})
_KEPT = 512


@dataclass(frozen=True)
class Notice:
    """One event for people.

    Attributes:
        at_s: seconds since the first worker attached, as far as clocks agree.
        key: the same in the reports of several workers on one event.
        text: a sentence without a full stop.
        kind: of the event.
    """

    at_s: float
    key: str
    text: str
    kind: str = ""


def worker_notice(rank: int, event: dict[str, Any], at_s: float) -> Notice | None:
    """The notice of an event in a worker's log; None for events that are not shown."""
    kind = str(event.get("kind", ""))
    if not kind or kind in _QUIET:
        return None
    return replace(_worker_notice(kind, rank, event, at_s), kind=kind)


def _worker_notice(kind: str, rank: int, event: dict[str, Any], at_s: float) -> Notice:
    if kind == "lost":
        lost = event.get("rank_lost")
        return Notice(at_s, f"lost {lost}", f"worker {lost} is lost: {event.get('why', '')}")
    if kind == "left_out":
        out, exchange = event.get("rank_left_out"), event.get("exchange")
        again = f" ({event['in_a_row']} in a row: probably broken)" if int(event.get("in_a_row", 1)) >= 3 else ""
        text = f"worker {out}'s contribution was rejected in exchange {exchange}: {event.get('why', '')}{again}"
        return Notice(at_s, f"left_out {out} {exchange}", text)
    if kind == "tune" and ("changes" in event or "refused" in event):
        return Notice(at_s, f"tune {event.get('block')} {event.get('changes', event.get('wanted'))}", _tuned(event))
    if kind == "takeover":
        lost = event.get("slice_of")
        return Notice(at_s, f"takeover {lost}", f"worker {rank} takes over from {lost}")
    if kind in ("save", "resume"):
        done = "saved" if kind == "save" else "resumed from"
        return Notice(at_s, f"{kind} {event.get('path')} {int(at_s) // 5}", f"{done} {event.get('path', '')}")
    if kind == "rule":
        return Notice(at_s, f"rule {event.get('why')}", str(event.get("why", "")))
    if kind == "error":
        first, *_ = str(event.get("message", "")).splitlines() or [""]
        return Notice(at_s, f"error {rank}", f"worker {rank}: {first[:300]}")
    if kind == "waiting":
        return _waiting(event, at_s)
    return Notice(at_s, f"{kind} {_facts(event)}", f"{kind}: {_facts(event)}")


def _tuned(event: dict[str, Any]) -> str:
    """A change of settings, that measured times or a worker asked for."""
    asked = f"asked by worker {event.get('by')}"
    if event.get("refused"):
        return f"{asked} to tune, refused: {event['refused']}"
    changes = ", ".join(f"{name} {before} → {after}" for name, (before, after) in event["changes"].items())
    return f"{'undone: ' if event.get('revert') else ''}{changes}: {event.get('why') or asked}"


def _waiting(event: dict[str, Any], at_s: float) -> Notice:
    missing = [row for row in event.get("workers", []) if row.get("state") != "waits"]
    words = "; ".join(f"worker {row.get('rank')} {row.get('text', '')}" for row in missing)
    return Notice(at_s, "waiting", f"the exchange failed: {words or 'no worker is missing'}")


def control_notice(event: ControlEvent, at_s: float) -> Notice:
    """The notice of an event of the control plane."""
    return Notice(at_s, f"control {event.kind} {at_s} {event.text}", event.text, event.kind)


def _facts(event: dict[str, Any]) -> str:
    """The fields of an event of unknown kind."""
    shown = {name: value for name, value in event.items() if name not in _HIDDEN and value is not None}
    return ", ".join(f"{name}={_short(value)}" for name, value in shown.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


class JsonLinesTail:
    """Follows a growing file of JSON lines; lines that are no events are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """The events on lines that were completed since the last call, in bounded memory."""
        while data := self._chunk():
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LONGEST_LINE:
                self._rest = b"\0"  # the rest of that line is no event either
            yield from parse_lines(lines)

    def _chunk(self) -> bytes:
        """What follows in the file, if anything."""
        if not self.path.is_file():
            return b""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(LONGEST_LINE)
        except OSError:
            return b""  # it was removed; a view should not fail
        self._offset += len(data)
        return data


class Notices:
    """The newest notices of a run, each event once."""

    def __init__(self) -> None:
        self._items: dict[str, Notice] = {}

    def add(self, item: Notice | None) -> None:
        """Add a notice; of several on one event keep the earliest."""
        if item is None:
            return
        before = self._items.get(item.key)
        if before is None or item.at_s < before.at_s:
            self._items[item.key] = item
        if len(self._items) > 2 * _KEPT:
            self._items = {one.key: one for one in self.newest(_KEPT)}

    def newest(self, count: int) -> list[Notice]:
        """The last `count`, in order of time."""
        return sorted(self._items.values(), key=lambda one: one.at_s)[-count:] if count else []
