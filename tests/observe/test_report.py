# SPDX-License-Identifier: Apache-2.0
"""The report: one page that needs nothing else, and says what the logs say."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import ExtraTable, read_run, write_report
from paceline.observe.canvas import MissingExtraError
from paceline.observe.report import draw_all
from paceline.observe.summary import bytes_text, seconds_text, value_text

Write = Callable[..., Path]
VOID = {"meta", "link", "br", "hr", "img", "input"}
FIGURES = {"loss-by-samples", "loss-by-time", "time-per-worker", "bytes-over-time"}


class Page(HTMLParser):
    """Text of a page, its ids and links; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
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
        self.text.append(data.strip())


def parse(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_says_what_the_logs_say(write_run: Write, tmp_path: Path) -> None:
    path = write_report(write_run(size=4), tmp_path / "out")
    assert path == tmp_path / "out" / "index.html"
    text = parse(path).text
    for wanted in ("bmuf(period=4)", "20,480", "640", "80.0 %", "40 kB", "1 kB", "40.5 s"):
        assert wanted in text
    assert text.count("host-1") == 2  # a row a worker


def test_the_page_asks_the_network_for_nothing(write_run: Write, tmp_path: Path) -> None:
    page = parse(write_report(write_run(), tmp_path))
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    css = (tmp_path / "index.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in css
    assert "@import" not in css


def test_no_two_figures_share_an_id(write_run: Write, tmp_path: Path) -> None:
    page = parse(write_report(write_run(), tmp_path))
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_the_pictures_lie_beside_the_page(write_run: Write, tmp_path: Path) -> None:
    write_report(write_run(), tmp_path / "out" / "page.html")
    pictures = {path.stem: path.read_bytes() for path in (tmp_path / "out").glob("*.png")}
    assert set(pictures) == FIGURES
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())


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
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 10


def test_several_runs_are_compared_under_their_names(write_run: Write, tmp_path: Path) -> None:
    runs = [write_run("serial", 1, "sync()"), write_run("four", 4), write_run("short", 2)]
    page = parse(write_report(runs, tmp_path / "out"))
    for wanted in ("Comparison", "serial", "four", "short", "sync()"):
        assert wanted in page.text


def test_equal_names_are_told_apart_by_their_paths(write_run: Write, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = [write_run("a/run"), write_run("b/run")]
    text = parse(write_report(runs, tmp_path / "out")).text
    assert {str(run) for run in runs} <= set(text)


def test_the_callers_table_comes_first(write_run: Write, tmp_path: Path) -> None:
    extra = ExtraTable("Result", [{"method": "serial", "loss": 1.5}, {"method": "x"}], "one seed")
    text = parse(write_report(write_run(), tmp_path, extra=extra)).text
    assert text.index("Result") < text.index("one seed") < text.index("wall time")
    assert "1.5" in text


def test_runs_without_values_or_exchanges_still_have_a_page(write_run: Write, tmp_path: Path) -> None:
    directory = write_run(size=1, change=lambda rank, events: events[:1])
    page = parse(write_report(directory, tmp_path / "out"))
    assert "Worker 0 never closed the run: killed, or still at work." in page.text
    assert "Figures" not in page.text
    assert list((tmp_path / "out").glob("*.png")) == []


def test_long_noisy_losses_are_drawn_with_their_mean(write_run: Write) -> None:
    def often(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        stamp = {"kind": "value", "rank": rank, "name": "loss"}
        values = [
            {**stamp, "at_s": 41 + i / 100, "value": 1.0 + i % 7, "total_minibatches": 160 + i,
             "total_samples": 5120 + 32 * i} for i in range(1000)
        ]  # fmt: skip
        return events + values

    figures = {stem: figure for stem, _, _, figure in draw_all([read_run(write_run(change=often))])}
    assert set(figures) == FIGURES
    raw, mean, validation = figures["loss-by-samples"].axes[0].lines
    assert max(raw.get_ydata()) - min(raw.get_ydata()) > 2 * (max(mean.get_ydata()[50:]) - min(mean.get_ydata()[50:]))
    assert validation.get_marker() == "o"


def test_counts_are_shortened_and_times_are_not(write_run: Write) -> None:
    figures = {stem: figure for stem, _, _, figure in draw_all([read_run(write_run(size=4))])}
    by_samples, by_time = (
        figures[stem].axes[0].xaxis.get_major_formatter() for stem in ("loss-by-samples", "loss-by-time")
    )
    assert by_samples(20_000) == "20k"
    assert "m" not in by_time(0.5)


def test_without_matplotlib_the_extra_is_named(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    directory = write_run()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=re.escape('pip install "paceline[report]"')):
        write_report(directory, tmp_path / "out")
    assert not (tmp_path / "out" / "index.html").exists()


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(999_600), "1 MB"),
        (bytes_text(1_240_000_000), "1.24 GB"),
        (seconds_text(8.314), "8.31 s"),
        (seconds_text(125.4), "2 min 05 s"),
        (seconds_text(11_230), "3 h 07 min"),
        (value_text(1.49834), "1.4983"),
        (value_text(float("nan")), "nan"),
        (value_text(1e-5), "1e-05"),
    ],
)
def test_numbers_are_written_for_people(shown: str, wanted: str) -> None:
    assert shown == wanted
