# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium: it is drawn, fits, can be used without a mouse, and follows a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_plugins.report import live_page, write_report
from paceline_plugins.report.live_page import LivePage, Status
from tests.browser import CHROMIUM, Browser, browser

from .conftest import Event, lines, pushing, served, waiting

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, which shows the page"),
]

Write = Callable[..., Path]
WIDTHS = (390, 1024, 1440)
CHART = "figure[data-chart=loss-by-time]"
PIXELS = """(() => { const found = {}; document.querySelectorAll("figure canvas").forEach(canvas => {
  const key = canvas.closest("figure").dataset.chart, ctx = canvas.getContext("2d");
  const seen = ctx.getImageData(0, 0, canvas.width, canvas.height).data;
  found[key] = seen.filter((value, k) => k % 4 === 3 && value > 0).length; }); return found; })()"""
TOO_WIDE = """[...document.querySelectorAll("main *, .live *")].filter(one => !one.closest(".wide, .hidden, svg") &&
  one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))"""
CUT = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as one:
        yield one


def long_names(rank: int, events: list[Event]) -> list[Event]:
    """A run with all that is wide: names without a space, many events."""
    events = waiting(rank, events)
    events[0] |= {"rule": "bmuf(" + "x" * 300 + ")", "host": "h" * 80}
    events[3:3] = [
        {"kind": "save", "at_s": k / 10, "rank": rank, "path": "/long" * 30 + str(k)} for k in range(0, 300, 60)
    ]
    return [event | {"name": "loss_of_" + "y" * 90} if event.get("name") == "loss" else event for event in events]


def fits(page: Browser) -> None:
    assert page.run(CUT) <= 0 and page.run(TOO_WIDE) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_page(
    opened: Browser, write_run: Write, tmp_path: Path, width: int, dark: bool
) -> None:
    runs = {
        "one": write_report(write_run("one", 4, change=long_names), tmp_path / "one.html", title="t" * 200),
        "two": write_report([write_run("a", 4, change=pushing), write_run("b")], tmp_path / "two.html"),
    }
    opened.screen(width, dark=dark)
    for path in runs.values():
        opened.errors.clear()
        opened.requests.clear()
        opened.open(path.as_uri())
        opened.wait_for(f"document.querySelectorAll('figure canvas').length >= 7 && {CUT} <= 0")
        drawn = opened.run(PIXELS)
        assert len(drawn) == opened.run("document.querySelectorAll('figure[data-chart]').length")
        assert all(count > 500 for count in drawn.values()), drawn
        fits(opened)
        assert opened.errors == []
        assert opened.requests == [path.as_uri()]  # it asks the network for nothing
    paper = opened.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")


def test_a_chart_of_one_point_shows_it_and_a_wide_table_says_that_it_scrolls(
    opened: Browser, write_run: Write, tmp_path: Path
) -> None:
    opened.screen(390)
    opened.open(write_report(write_run(change=lambda rank, events: events[:4]), tmp_path).as_uri())
    opened.wait_for("document.querySelectorAll('figure canvas').length > 2")
    blue = PIXELS.replace("k % 4 === 3 && value > 0", "k % 4 === 2 && value === 184")  # of --c0
    assert all(count > 10 for count in opened.run(blue).values())
    seen = opened.run(
        "[...document.querySelectorAll('section > .wide')].map(one => [one.scrollWidth > one.clientWidth, "
        "getComputedStyle(one, '::before').content.includes('scrolls')])"
    )
    assert [True, True] in seen and all(wide == told for wide, told in seen)


def test_charts_can_be_read_and_zoomed_by_keys(opened: Browser, write_run: Write, tmp_path: Path) -> None:
    opened.screen(1024)
    opened.open(write_report(write_run(), tmp_path).as_uri())
    opened.run(f"document.querySelector('{CHART} .plot').focus()")
    opened.press("Home")
    said = f"document.querySelector('{CHART} [role=status]').textContent"
    assert opened.run(said).startswith("time since attach [s]: 1; loss ")
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    assert opened.run(said).startswith("time since attach [s]: 3; loss ")
    assert opened.run(f"document.querySelector('{CHART} .legend').textContent").endswith("at 3")
    before = opened.run(f"document.querySelector('{CHART} canvas').toDataURL()")
    opened.press("+")
    opened.wait_for(f"document.querySelector('{CHART} canvas').toDataURL() !== {json.dumps(before)}")
    opened.press("End")  # which lies outside of what is shown
    opened.wait_for(f"{said}.startsWith('time since attach [s]: 40; loss ')")
    opened.press("Escape")
    opened.wait_for(f"{said} === 'All is shown.'")


def test_each_chart_has_a_table(opened: Browser, write_run: Write, tmp_path: Path) -> None:
    opened.open(write_report(write_run(size=1, change=waiting), tmp_path).as_uri())
    opened.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    opened.wait_for("document.querySelectorAll('details table').length === document.querySelectorAll('canvas').length")
    rows = opened.run(
        f"[...document.querySelectorAll('{CHART} tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert rows[0] == ["time since attach [s]", "loss (training)", "validation loss"] and len(rows) == 41
    assert rows[-1][0] == "40" and float(rows[-1][2]) == pytest.approx(1.6 + 2.0 * 2.718281828 ** (-40 / 6), abs=1e-3)


def test_every_control_has_a_name_and_can_be_reached(opened: Browser, write_run: Write, tmp_path: Path) -> None:
    opened.open(write_report(write_run(), tmp_path).as_uri())
    opened.wait_for("document.querySelector('figure canvas')")
    tree = opened.send("Accessibility.getFullAXTree")["nodes"]
    buttons = [node["name"]["value"] for node in tree if node.get("role", {}).get("value") == "button"]
    assert len(buttons) == len(set(buttons)) and "Zoom in: Loss by time" in buttons and all(buttons)
    images = [node["name"]["value"] for node in tree if node.get("role", {}).get("value") in ("image", "img")]
    assert any(name.startswith("worker 0: computing 80.0 %") for name in images)
    assert opened.run("[...document.querySelectorAll('.plot')].every(one => one.tabIndex === 0)")
    small = (
        "[...document.querySelectorAll('button')].filter(one => one.offsetHeight < 24 || one.offsetWidth < 24).length"
    )
    assert opened.run(small) == 0  # WCAG 2.2: targets of 24 px


def test_a_picture_is_saved_and_paper_is_white(opened: Browser, write_run: Write, tmp_path: Path) -> None:
    opened.screen(1024, dark=True)
    opened.open(write_report(write_run(), tmp_path).as_uri())
    opened.wait_for("document.querySelector('figure canvas')")
    opened.run("HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }")
    opened.run(f"document.querySelector('{CHART} button[title^=Save]').click()")
    name, address = opened.run("window.saved")
    assert name == "loss-by-time.png" and address.startswith("data:image/png;base64,") and len(address) > 10_000
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    opened.screen(794, dark=True, paper=True)  # A4
    opened.wait_for(
        f"{CUT} <= 0 && [...document.querySelectorAll('.wide')].every(one => one.scrollWidth <= innerWidth)"
    )
    opened.screen(1024, dark=True)
    opened.run("dispatchEvent(new Event('afterprint'))")
    assert opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert opened.run("document.querySelectorAll('.u-wrap').length === document.querySelectorAll('.plot').length")


def test_nothing_of_a_log_runs(opened: Browser, write_run: Write, tmp_path: Path) -> None:
    nasty = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"

    def spoil(rank: int, events: list[Event]) -> list[Event]:
        events[0] |= {"host": nasty, "rule": nasty}
        return [event | {"name": f"loss {nasty}"} if event.get("name") == "loss" else event for event in events]

    opened.errors.clear()
    opened.open(write_report(write_run(change=spoil), tmp_path, title=nasty).as_uri())
    opened.wait_for("document.querySelector('figure canvas')")
    assert opened.run("window.ran") is None and opened.run("document.images.length") == 0
    assert opened.errors == []
    assert opened.run("document.querySelector('h1').textContent") == nasty
    # and if some text were not escaped, the policy would stop it
    opened.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 3\">')")
    opened.wait_for("document.images.length === 1")
    opened.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert opened.run("window.ran") is None
    assert any("Content Security Policy" in error for error in opened.errors)


# -- a live page -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("token", ["", "of-the-page"])
def test_a_live_page_follows_the_run(
    opened: Browser, write_run: Write, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr(live_page, "EVERY_S", 0.05)
    directory = write_run()
    whole: dict[Path, list[Any]] = {
        path: [json.loads(line) for line in path.read_text().splitlines()] for path in directory.glob("*.jsonl")
    }
    for path in whole:
        path.unlink()
    now = {"status": Status("starting")}

    def goes_on(since: float, until: float) -> None:
        for path, events in whole.items():
            with path.open("a") as file:
                file.write(lines([event for event in events if since <= event["at_s"] < until]))
        page.refresh()

    page = LivePage(directory, lambda: now["status"], token)
    page.refresh()
    opened.screen(390)
    opened.open("about:blank")
    opened.errors.clear()
    opened.requests.clear()
    with served(page) as port:
        address = f"http://127.0.0.1:{port}/"
        opened.open(address + (f"?token={token}" if token else ""))
        assert "No worker has attached yet." in opened.run("document.querySelector('main').textContent")
        now["status"] = Status("<b>epoch 1</b>", states={0: "at work", 1: "silent"})
        goes_on(0, 10.5)
        opened.wait_for("document.getElementById('status').textContent === '<b>epoch 1</b>'")
        opened.wait_for("document.querySelectorAll('figure canvas').length >= 6")
        last = f"document.querySelector('{CHART} .legend').textContent"
        assert opened.run(last).endswith("at 10")
        assert "silent" in opened.run("document.getElementById('part-workers-0').textContent")
        assert opened.run("document.getElementById('said').textContent") == "starting"  # not each number is read aloud
        opened.run(f"window.first = document.querySelector('{CHART} canvas')")
        opened.run("document.querySelector('#part-workers-0 .wide').focus()")
        goes_on(10.5, 30.5)
        opened.wait_for(f"{last}.endsWith('at 30')")
        assert opened.run(f"window.first === document.querySelector('{CHART} canvas')")  # the same chart, more points
        assert opened.run("document.activeElement === document.querySelector('#part-workers-0 .wide')")
        opened.run("getSelection().selectAllChildren(document.getElementById('part-head'))")
        opened.run(f"document.querySelector('{CHART} .plot').focus()")
        opened.press("Home")
        opened.press("+")  # what a reader looks at stays
        now["status"] = Status("over", over=True)
        goes_on(30.5, 99)
        opened.wait_for("document.getElementById('part-numbers').textContent.includes('10,240')")
        assert opened.run(last).endswith("at 1")
        assert opened.run("document.getElementById('said').textContent") == "over"
        fits(opened)
        opened.run("document.getElementById('pause').click()")
        assert opened.run("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        opened.run("document.getElementById('pause').click()")
        assert opened.errors == []
        assert all(one.startswith(address) for one in opened.requests if one.startswith("http"))
    opened.wait_for("document.getElementById('status').textContent.startsWith('No answer')")
