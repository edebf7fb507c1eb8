# SPDX-License-Identifier: Apache-2.0
"""The report: one page that needs nothing else, and says what the logs say."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from base64 import b64encode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import read_run
from paceline_plugins.report import ExtraTable, write_report
from paceline_plugins.report.chart_page import inline_json
from paceline_plugins.report.tables import comparison
from paceline_plugins.report.totals import warnings

from .conftest import pushing, waiting

Write = Callable[..., Path]
VOID = {"meta", "link", "br", "hr", "img", "input"}
EFFICIENCY = "efficiency: time at work"
OWN_SCRIPTS = 3
"""uPlot, the page's own, and the data."""


class Page(HTMLParser):
    """Text of a page, its ids and links; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.code: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "src", "xlink:href", "action"):
                self.links.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["script"], ["style"]):
            self.code.append(data)
        else:
            self.text.append(data.strip())

    @property
    def data(self) -> Any:
        """What the page's own script is given."""
        return json.loads(next(code for code in self.code if code.startswith("{")))


def parse(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_says_what_the_logs_say(write_run: Write, tmp_path: Path) -> None:
    path = write_report(write_run(size=4), tmp_path / "out")
    assert path == tmp_path / "out" / "index.html"
    text = parse(path).text
    for wanted in ("bmuf(period=4)", "20,480", "640", "80.0 %", "40 kB", "40.5 s", "The log shows no problem."):
        assert wanted in text
    names = [word for word in text[text.index("The log shows no problem.") : text.index("Loss by samples")] if word]
    assert names[2::2] == ["validation loss, at the end", "samples per second", EFFICIENCY, "wall time", "exchanges"]
    assert names[3::2] == ["506", "80.0 %", "40.5 s", "40"]
    assert text.count("host-1") == 2  # a row a worker


def test_all_text_is_escaped(write_run: Write, tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>&"

    def spoil(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        events[0] |= {"host": nasty, "version": nasty}
        events.append({"kind": "error", "at_s": 1.0, "rank": rank, "message": nasty})
        for event in events:
            if event.get("name") == "loss":
                event["name"] = f"loss {nasty}"
        return events

    directory = write_run(rule=nasty, change=spoil)
    extra = ExtraTable(nasty, [{nasty: nasty}], nasty)
    html = write_report(directory, tmp_path / "out", title=nasty, extra=extra).read_text()
    assert html.count("<script") == OWN_SCRIPTS
    assert html.count("&lt;script&gt;") > 10
    assert any(nasty in line["name"] for line in Page(html).data["charts"]["loss-by-samples"]["lines"])


def test_the_page_tells_of_pushes_and_of_the_lost(write_run: Write, tmp_path: Path) -> None:
    path = write_report(write_run("run", 4, "asgd()", change=pushing), tmp_path / "out")
    text = parse(path).text
    numbers = dict(itertools.pairwise(text))
    assert numbers["mean delay of a push"] == "1.78"
    assert numbers["largest delay"] == "6"
    assert numbers["pushes rejected"] == "2"
    assert numbers["taken over by"] == "worker 3"
    assert any("its connection was reset" in line for line in text[: text.index("wall time")])
    assert any(line.startswith("The delay of a push is the number of updates") for line in text)
    assert text.count("closed") == 3  # and not "not closed" for the one that was lost
    assert "delay-of-pushes" in parse(path).data["charts"]


def test_runs_without_values_or_exchanges_still_have_a_page(write_run: Write, tmp_path: Path) -> None:
    directory = write_run(size=1, change=lambda rank, events: events[:1])
    page = parse(write_report(directory, tmp_path / "out"))
    assert "Worker 0 never closed the run: killed, or still at work. Wait, or start it again." in page.text
    assert page.data["charts"] == {}


def test_the_policy_allows_the_own_scripts_and_no_other(write_run: Write, tmp_path: Path) -> None:
    """The digests are those of the scripts as they stand in the file."""
    text = write_report(write_run(), tmp_path).read_text(encoding="utf-8")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    rules = {name: words.split() for name, _, words in (rule.strip().partition(" ") for rule in policy.split(";"))}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in inline]
        assert rules[name] == [f"'sha256-{digest}'" for digest in digests] and inline
    assert " style=" not in text and "unsafe" not in policy


def test_no_text_ends_the_script_with_the_data() -> None:
    nasty = {"a": "</script><!--\u2028\u2029&", "b": [1.5, None]}
    text = inline_json(nasty)
    assert json.loads(text) == nasty and text.isascii() and not re.search("[<>&]", text)
    with pytest.raises(ValueError, match="JSON"):
        inline_json(float("nan"))  # which no browser reads


def test_a_comparison_has_the_measured_ratio_to_one_worker(write_run: Write) -> None:
    rows = comparison([read_run(write_run(f"of-{size}", size)) for size in (1, 4)])
    assert [row["times one worker's, measured"] for row in rows] == ["1.00", "4.00"]


def test_bars_add_up_to_the_time_of_each_worker(write_run: Write, tmp_path: Path) -> None:
    text = write_report(write_run(change=waiting), tmp_path).read_text(encoding="utf-8")
    bars = re.findall(r"<svg.*?</svg>", text)
    assert len(bars) == 2
    for bar, compute, data in zip(bars, (600, 500), (200, 300), strict=True):
        widths = {part: float(width) for part, width in re.findall(r'class="(\w+)" x="[\d.]+" width="([\d.]+)"', bar)}
        assert widths == pytest.approx({"compute": compute, "data": data, "wait": 150, "exchange": 50})
    assert 'aria-label="worker 0: computing 60.0 %, waiting for data 20.0 %, waiting 15.0 %, exchanging 5.0 %"' in text


def test_a_report_says_what_each_machine_is_worth(write_run: Write) -> None:
    """Worker 1 computes for a quarter of a second where the others have a sixteenth, so that they wait for it."""

    def slow(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["kind"] == "exchange":
                event["compute_s"] = 0.25 if rank == 1 else 0.0625
                event["wait_s"] = 0.7 if rank == 1 else 0.8875
        return events

    run = read_run(write_run(size=3, change=slow))
    [row] = comparison([run])
    assert row["worth of the workers"] == "2.2 of the fastest (worker 1 on host-0 0.25; 2 without)"
    assert any("even=False" in text and "worth 2.2 of the fastest" in text for text in warnings(run))
    assert "worth of the workers" not in comparison([read_run(write_run("equal"))])[0]
