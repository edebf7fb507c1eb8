# SPDX-License-Identifier: Apache-2.0
"""The report: one page that needs nothing else, and says what the logs say."""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.core.extras import MissingExtraError
from paceline.observe import ExtraTable, read_run, write_report
from paceline.observe.reports.canvas import colour
from paceline.observe.reports.report import draw_all
from paceline.observe.reports.summary import bytes_text, seconds_text, value_text
from paceline.observe.reports.tables import comparison

from .conftest import pushing, waiting

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


def test_the_page_tells_of_pushes_and_of_the_lost(write_run: Write, tmp_path: Path) -> None:
    path = write_report(write_run("run", 4, "asgd()", change=pushing), tmp_path / "out")
    text = parse(path).text
    cards = {name: value for value, name in itertools.pairwise(text[: text.index("Figures")])}
    assert cards["mean delay of a push"] == "1.78"
    assert cards["largest delay"] == "6"
    assert cards["pushes rejected"] == "2"
    assert cards["lost"] == "worker 2"
    assert cards["taken over by"] == "worker 3"
    assert any("its connection was reset" in line for line in text)
    assert any(line.startswith("The delay of a push is the number of updates") for line in text)
    assert text.count("closed") == 3  # and not "not closed" for the one that was lost
    assert (tmp_path / "out" / "delay-of-pushes.png").read_bytes().startswith(b"\x89PNG")


def test_a_synchronous_page_has_no_word_of_delays(write_run: Write, tmp_path: Path) -> None:
    html = write_report(write_run(size=4), tmp_path / "one").read_text()
    both = write_report([write_run("a"), write_run("b")], tmp_path / "two").read_text()
    for page in (html, both):
        assert "delay" not in page
        assert "push" not in page
        assert "Waiting is for the slowest worker" in page


def test_what_a_lost_worker_left_is_escaped(write_run: Write, tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>&"

    def spoil(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        said = pushing(rank, events)
        for event in said:
            if event["kind"] == "lost":
                event["why"] = nasty
            if event["kind"] == "takeover":
                event["from"] = nasty
        return said

    html = write_report(write_run("run", 4, change=spoil), tmp_path / "out").read_text()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 2


def test_pushes_have_a_table_of_their_own_when_runs_are_compared(write_run: Write, tmp_path: Path) -> None:
    runs = [write_run("serial", 1), write_run("asgd", 4, "asgd()", change=pushing)]
    text = parse(write_report(runs, tmp_path / "out")).text
    table = text[text.index("Pushes and lost workers") : text.index("Figures")]
    assert "asgd" in table and "serial" not in table
    assert "worker 2" in table
    terminal = comparison([read_run(run) for run in runs])
    assert [row.get("largest delay") for row in terminal] == [None, "6"]


def drawn(*runs: Path, figure: str = "delay-of-pushes") -> Any:
    figures = {stem: made for stem, _, _, made in draw_all([read_run(run) for run in runs])}
    return figures[figure].axes[0]


def test_the_page_tells_of_data(write_run: Write, tmp_path: Path) -> None:
    text = parse(write_report(write_run("run", 4, change=waiting), tmp_path / "out")).text
    cards = {name: value for value, name in itertools.pairwise(text[: text.index("Sources of data")])}
    assert cards["waiting for data"] == "22.5 %"
    assert any(line.startswith("Workers waited 22.5 % of the time for data: give the loader") for line in text)
    table = text[text.index("Sources of data") : text.index("Figures")]
    cells = [cell for cell in table if cell]
    row = cells[cells.index("s3://bucket") + 1 :]
    assert row[:7] == ["360", "120", "75.0 %", "120 MB", "15 s", "3", "0"]
    assert text[text.index("Workers") :].count("20.0 %") == 3 and "30.0 %" in text[text.index("Workers") :]
    assert (tmp_path / "out" / "data-over-time.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_sources_are_escaped(write_run: Write, tmp_path: Path) -> None:
    def spoil(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            event | {"sources": {"<script>alert(1)</script>": {"hits": 1}}} if event["kind"] == "cache" else event
            for event in waiting(rank, events)
        ]

    html = write_report(write_run(change=spoil), tmp_path / "out").read_text()
    assert "<script" not in html and "&lt;script&gt;" in html


def test_a_little_waiting_is_a_note_and_no_warning(write_run: Write, tmp_path: Path) -> None:
    def wait(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event | {"data_s": 0.005} if event["kind"] == "exchange" else event for event in events]

    html = write_report(write_run(change=wait), tmp_path / "out").read_text()
    assert '<p class="note">Workers waited 0.5 % of the time for data.</p>' in html
    assert 'class="warnings"' not in html
    assert not (tmp_path / "out" / "data-over-time.png").exists()  # a line at the bottom would say no more


def test_pages_of_logs_from_before_have_no_word_of_data(write_run: Write, tmp_path: Path) -> None:
    html = write_report([write_run("a"), write_run("b")], tmp_path / "out").read_text()
    html += write_report(write_run("a"), tmp_path / "one").read_text()
    assert "for data" not in html and "Sources" not in html


def test_old_and_new_logs_are_compared(write_run: Write, tmp_path: Path) -> None:
    runs = [write_run("old"), write_run("new", change=waiting), write_run("newer", change=waiting)]
    text = parse(write_report(runs, tmp_path / "out")).text
    assert text[text.index("Sources of data") : text.index("Figures")].count("s3://bucket") == 2
    lines = drawn(*runs, figure="data-over-time").lines
    assert [(line.get_label(), line.get_color()) for line in lines] == [("new", colour(1)), ("newer", colour(2))]
    rows = comparison([read_run(run) for run in runs])
    assert [row.get("waiting for data") for row in rows] == ["n/a", "25.0 %", "25.0 %"]


def test_bars_have_the_wait_for_data_behind_the_computing(write_run: Write) -> None:
    axes = drawn(write_run(change=waiting), figure="time-per-worker")
    bars = {label: [bar.get_width() for bar in part] for label, part in
            zip(axes.get_legend_handles_labels()[1], axes.containers, strict=True)}  # fmt: skip
    assert list(bars) == ["computing", "waiting for data", "waiting for the slowest", "exchanging"]
    assert bars["waiting for data"] == pytest.approx([8, 12])
    assert bars["computing"] == pytest.approx([24, 20])


def test_a_line_a_worker(write_run: Write) -> None:
    axes = drawn(write_run(size=3, change=waiting), figure="data-over-time")
    assert [line.get_color() for line in axes.lines] == [colour(0), colour(1), colour(2)]
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([20, 40, 20])


def test_of_many_workers_the_one_that_waits_most_stands_out(write_run: Write) -> None:
    axes = drawn(write_run(size=9, change=waiting), figure="data-over-time")
    *pale, most = axes.lines
    assert len(pale) == 9 and {line.get_color() for line in pale} == {colour(0)}
    assert (most.get_label(), most.get_color()) == ("worker 1", colour(1))
    assert list(most.get_ydata()) == list(pale[1].get_ydata())
    assert axes.get_legend_handles_labels()[1] == ["worker 1"]


def test_delays_are_bars_and_their_mean_a_line(write_run: Write) -> None:
    axes = drawn(write_run("run", 4, change=pushing))
    assert [round(bar.get_height() * 5.52) for bar in axes.patches] == [160, 120, 94, 120, 18, 0, 40]
    assert [bar.get_x() + bar.get_width() / 2 for bar in axes.patches] == pytest.approx(range(7))
    (mean,) = axes.lines
    assert mean.get_xdata()[0] == pytest.approx(980 / 552)
    assert mean.get_label() == "mean 1.78"


def test_each_run_that_pushes_has_its_colour(write_run: Write) -> None:
    runs = [write_run(name, 4, change=pushing) for name in ("a", "b")]
    axes = drawn(runs[0], write_run("still", 2), runs[1])
    assert [line.get_label() for line in axes.lines] == ["a: mean 1.78", "b: mean 1.78"]
    assert [line.get_color() for line in axes.lines] == [colour(0), colour(2)]  # as in the other figures


@pytest.mark.parametrize(
    ("delays", "end", "bars"),
    [
        ({"0": 10}, 0.5, 1),
        ({"0": 500, "3": 499, "4000": 1}, 3.5, 4),  # one push that came far too late squeezes nobody
        ({"0": 500, "60": 400, "99": 100}, 99.5, 34),  # 100 delays, 3 in a bar
    ],
    ids=["one delay", "a rare one", "many"],
)
def test_bars_stay_wide_enough(write_run: Write, delays: dict[str, int], end: float, bars: int) -> None:
    def give(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        next(event for event in events if event["kind"] == "exchange")["delays"] = delays
        return events

    axes = drawn(write_run(size=1, change=give))
    assert len(axes.patches) == bars
    shown = sum(bar.get_height() for bar in axes.patches)
    assert shown == pytest.approx(100.0, abs=0.5)
    width = axes.patches[0].get_width() / 0.86
    assert end <= axes.get_xlim()[1] <= end + 2.5 * width


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
            raise ModuleNotFoundError(name, name=name)
        return real(name, *args, **kwargs)

    directory = write_run()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'paceline[report]'")):
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


def test_a_page_can_be_mailed(write_run: Write, tmp_path: Path) -> None:
    """One file under 1 MB that asks nobody for anything, and says how wide a telephone is to show it."""
    runs = [write_run(f"run-{k}", size=4) for k in range(4)]
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert len(page.encode()) < 1_000_000
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    asked = re.findall(r"""(?:src|href|srcset|action|poster|data)\s*=\s*["']?(?!#|data:)([^"'\s>]+)""", page)
    assert asked == [] and "<script" not in page and "<link" not in page and "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)  # names of namespaces are no requests
