# SPDX-License-Identifier: Apache-2.0
"""The page of a run that still trains: the report's page, and what has changed since a browser last asked.

`LivePage.refresh` reads the logs and makes the page anew; `LivePage.answer` serves what is ready, so that a slow
browser holds up nothing.

There are two addresses: `/` is the page, `/data?since=N` the sections and charts that are newer than revision N. No
path leads to a file.
"""

from __future__ import annotations

import gzip
import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.observe.http_server import Answer
from paceline.observe.reports.elastic_events import read_events
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.observe.reports.notices import JsonLinesTail
from paceline.observe.reports.read import LOG_NAME, Folding, add_event, align_logs
from paceline_plugins.report.chart_page import document, policy
from paceline_plugins.report.charts import Chart, charts
from paceline_plugins.report.sections import Shown, sections

EVERY_S = 2.0
LARGEST_SHARE = 0.1
"""Of a core, for the page: where a refresh takes longer, there are fewer."""
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
HTML, JSON = "text/html; charset=utf-8", "application/json"


@dataclass(frozen=True)
class Status:
    """What the run does now."""

    text: str = ""  # for the top of the page
    over: bool = False  # whether all workers have ended
    states: Mapping[int, str] = field(default_factory=dict)  # worker -> its state


@dataclass(frozen=True)
class _Ready:
    """A page that can be served."""

    title: str
    status: Status
    revision: int
    sections: dict[str, tuple[int, str]] = field(default_factory=dict)  # key -> revision of the change, HTML
    charts: dict[str, tuple[int, Chart, str]] = field(default_factory=dict)  # the same, and its JSON


class LivePage:
    """A page for browsers.

    Args:
        directory: of the logs.
        status: what the run does now; called before each refresh.
        token: what a request has to bring along; empty for a page that only this machine reaches.
    """

    def __init__(self, directory: Path, status: Callable[[], Status], token: str = "") -> None:
        self._follower, self._status = RunFollower(directory), status
        self._token = token
        self._read = -1
        # A browser that was served by an earlier server of this address gets all sections anew.
        self._ready = _Ready(f"Run {directory.resolve().name}", Status("The logs are read."), int(1000 * time.time()))
        self._show({"head": self._head("The logs are read.")}, [], self._ready.status)

    def refresh(self) -> float:
        """Read what the workers have written, and make the page; returns the seconds until the next refresh."""
        began = time.monotonic()
        status = self._status()
        run = self._follower.poll()
        if run is None:
            self._show({"head": self._head("No worker has attached yet.")}, [], status)
        elif (self._read, self._ready.status) != (self._follower.events, status):
            drawn = charts([run])
            shown = Shown(self._ready.title, states=None if status.over else status.states)
            self._show(sections([run], drawn, shown), drawn, status)
        self._read = self._follower.events
        return max(EVERY_S, (time.monotonic() - began) / LARGEST_SHARE)

    def _head(self, text: str) -> str:
        return f'<h1>{escape(self._ready.title)}</h1><p class="lead">{escape(text)}</p>'

    def _show(self, parts: dict[str, str], drawn: list[Chart], status: Status) -> None:
        """Let requests from now on have these sections; the old ones stay whole for those that are under way."""
        old, revision = self._ready, self._ready.revision + 1
        kept = {
            key: old.sections[key] if old.sections.get(key, (0, ""))[1] == html else (revision, html)
            for key, html in parts.items()
        }
        told = {}
        for chart in drawn:
            text = json.dumps(chart.as_json())
            same = chart.key in old.charts and old.charts[chart.key][2] == text
            told[chart.key] = old.charts[chart.key] if same else (revision, chart, text)
        self._ready = _Ready(old.title, status, revision, kept, told)

    def answer(self, path: str, headers: Message) -> Answer:
        """The answer to a request."""
        where = urlsplit(path)
        query = parse_qs(where.query)
        refused = self._refused(headers, query)
        if refused:
            return Answer(403, body=refused.encode(), headers=_headers())
        if where.path == "/":
            return _packed(HTML, self._document(), headers)
        if where.path == "/data":
            return _packed(JSON, json.dumps(self._news(_number(query.get("since", ["0"])[0]))), headers)
        return Answer(204 if where.path == "/favicon.ico" else 404, headers=_headers())

    def _refused(self, headers: Message, query: Mapping[str, list[str]]) -> str:
        """Why a request gets nothing; empty where it is allowed.

        A page of the web can name an address of its own that leads to this machine (DNS rebinding), and its script
        could then read the answer. The browser tells the name in `Host`. It cannot know the token.
        """
        if self._token:
            given = query.get("token", [""])[0]
            allowed = hmac.compare_digest(given.encode(), self._token.encode())
            return "" if allowed else "The address lacks its token: take the one that paceline watch has printed.\n"
        try:
            name = urlsplit(f"//{headers.get('Host', '')}").hostname
        except ValueError:
            name = None
        return "" if name in LOCAL else "This page is for browsers on this machine: open it as localhost.\n"

    def _document(self) -> str:
        ready = self._ready
        live = {**_state(ready), "every_s": EVERY_S}
        drawn = [chart for _, chart, _ in ready.charts.values()]
        return document(ready.title, {key: html for key, (_, html) in ready.sections.items()}, drawn, live)

    def _news(self, since: int) -> dict[str, Any]:
        ready = self._ready
        return {
            **_state(ready),
            "order": list(ready.sections),
            "parts": {key: html for key, (at, html) in ready.sections.items() if at > since},
            "charts": {key: json.loads(text) for key, (at, _, text) in ready.charts.items() if at > since},
        }


def _state(ready: _Ready) -> dict[str, Any]:
    return {"revision": ready.revision, "status": ready.status.text, "over": ready.status.over}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _headers() -> dict[str, str]:
    return {
        "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def _packed(kind: str, text: str, asked: Message) -> Answer:
    """An answer, compressed for a browser that reads it."""
    body, headers = text.encode(), _headers()
    if "gzip" in str(asked.get("Accept-Encoding", "")):
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    return Answer(200, kind, body, headers)


MOST_LINES, MOST_REPORTS = 500, 1_000
"""Of a worker: more than a chart shows, and little enough to sum up every other second."""


class RunFollower:
    """Follows the logs of a run.

    Args:
        directory: of the logs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events = 0  # lines read so far; unchanged where nothing was appended
        self._number = 0
        self._logs: dict[int, _GrowingLog] = {}

    def poll(self) -> RunLog | None:
        """Read new lines; None before the first worker has attached."""
        self._look_for_files()
        self.events += sum(log.read() for log in self._logs.values())
        workers = [self._logs[rank].log for rank in sorted(self._logs) if self._logs[rank].log.attach]
        if not workers:
            return None
        run = RunLog(self.directory, self._number, workers, self.directory.resolve().name)
        run.events = read_events(self.directory)
        align_logs(run)
        return run

    def _look_for_files(self) -> None:
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = LOG_NAME.fullmatch(path.name)
            if not match or not path.is_file():
                continue
            rank, number = int(match[1]), int(match[2] or 1)
            if number > self._number:
                self._number, self._logs = number, {}
            if number == self._number and rank not in self._logs:
                self._logs[rank] = _GrowingLog(path, rank)


class _GrowingLog:
    """One worker's file."""

    def __init__(self, path: Path, rank: int) -> None:
        self.log = WorkerLog(path=path, rank=rank)
        self._folding = Folding(self.log, MOST_LINES, MOST_REPORTS)
        self._tail = JsonLinesTail(path)

    def read(self) -> int:
        """Add new lines, and say how many there were."""
        count = 0
        for event in self._tail.read():
            count += 1
            try:
                add_event(self.log, event)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # the report counts them
            self._folding.after_event()
        return count
