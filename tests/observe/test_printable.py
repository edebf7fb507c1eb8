# SPDX-License-Identifier: Apache-2.0
"""Text of others reaches no terminal and no page as more than text."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from paceline.cli import app, console
from paceline.cli.run import failure, output
from paceline.observe.printable import CONTROL, coloured, plain, visible

TITLE, CLIPBOARD = "\x1b]0;pwned\x07", "\x1b]52;c;cm0gLXJm\x1b\\"
CLEAR, C1, LINK = "\x1b[2J\x1b[H", "\x9b2J", "\x1b]8;;http://evil\x07here\x1b]8;;\x07"
TURNED, BELL, BACK = "\u202eexe.txt\u2066", "\x07", "safe\b\b\b\brm\r"
EVIL = f"a{TITLE}{CLIPBOARD}{CLEAR}{C1}{LINK}{TURNED}{BELL}{BACK}\x7f\x00\ud800[/red][bold]z"
HTML = '"><script>alert(1)</script><img src=x onerror=alert(1)> --> <!-- $x^{ \\frac'


def test_every_control_character_becomes_a_sign() -> None:
    assert visible("\x1b[1m\x07\x7f\x9b\u202e") == "␛[1m␇␡\\x9b\\u202e"
    assert visible("tab\tline\nümlaut 漢字 🙂") == "tab\tline\nümlaut 漢字 🙂"
    assert not CONTROL.search(visible(EVIL)) and visible(EVIL).endswith("z")


def test_colours_of_a_program_stay_and_nothing_else() -> None:
    assert coloured("\x1b[1;31mred\x1b[0m") == "\x1b[1;31mred\x1b[0m"
    assert coloured(f"\x1b[32mx{TITLE}{CLEAR}{CLIPBOARD}{C1}y\x1b[0m") == "\x1b[32mxy\x1b[0m"
    assert coloured("cut off \x1b]52;c;abc") == "cut off " and coloured("cut \x1b[") == "cut "
    assert plain(f"\x1b[32mx{LINK}\x1b[0m{BELL}") == "xhere␇"
    assert not CONTROL.search(re.sub(r"\x1b\[[0-9;:]*m", "", coloured(EVIL)))


@pytest.fixture
def evil_log(tmp_path: Path) -> Path:
    """Whatever a log has of text is evil."""
    folder = tmp_path / "log"
    folder.mkdir()
    text = EVIL + HTML
    about = {"size": 2, "host": text, "rule": text, "transport": text, "parameters": 5, "version": text, "unix_s": 1.0}
    done = {"total_minibatches": 5, "total_samples": 50}
    for rank in range(2):
        events = [
            {"kind": "attach", "at_s": 0.0, **about},
            {"kind": "value", "at_s": 1.0, "name": f"loss{text}", "value": 1.5, **done},
            {"kind": "value", "at_s": 2.0, "name": f"loss{text}", "value": 1.0, **done},
            {"kind": "exchange", "at_s": 2.0, "block": 1, "minibatches": 5, "compute_s": 1.0, "bytes": 5, **done},
            {"kind": "lost", "at_s": 2.0, "rank_lost": 1, "why": text},
            {"kind": "left_out", "at_s": 2.0, "rank_left_out": 1, "why": text, "exchange": 1},
            {"kind": "tune", "at_s": 2.0, "changes": {text: [text, text]}, "why": text},
            {"kind": text, "at_s": 2.0, text: text},
            {"kind": "cache", "at_s": 2.0, "cache": text, "sources": {text: {"hits": 1}}},
            {"kind": "error", "at_s": 3.0, "message": text},
        ]
        (folder / f"rank-00{rank}.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    control = [
        {"kind": "joined", "at_s": 0.0, "worker": 0, "host": text},
        {"kind": "lost", "at_s": 1.0, "worker": 1, "host": text, "why": text},
        {"kind": "refused", "at_s": 1.0, "peer": text, "why": text},
        {"kind": text, "at_s": 1.0, text: text},
    ]
    (folder / "control.jsonl").write_text("\n".join(map(json.dumps, control)) + "\n")
    return folder


def harmless(output: str) -> bool:
    """Whether a terminal would only show it: our own colours and moves of a line aside."""
    return not CONTROL.search(re.sub(r"\x1b\[[0-9;]*m", "", output))


@pytest.mark.parametrize("terminal", [False, True])
def test_watch_and_report_show_evil_logs_as_text(
    evil_log: Path, tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    for command in (["watch", "--once", evil_log], ["report", evil_log, "--output", tmp_path / "page"]):
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert result.exit_code == 0, result.output
        assert harmless(result.stdout) and harmless(result.stderr)


class Tags(HTMLParser):
    """Collects what a browser would run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("script", "img", "iframe") else []
        self.found += [name for name, _ in attrs if name.startswith("on")]


def test_the_page_runs_nothing(evil_log: Path, tmp_path: Path) -> None:
    from paceline_plugins.report import write_report

    page = write_report(evil_log, tmp_path / "page", title=HTML).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert tags.found == ["script"] * 3  # its own: uPlot, what draws, and the data
    assert "&lt;script&gt;alert(1)" in page and "<!--" not in page
    assert not CONTROL.search(page)


def test_the_console_is_the_last_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for made in (console.out(), console.err()):
        made.file = sheet = io.StringIO()
        made.print(Text(EVIL, style="red"))
        made.print(console.error_panel(EVIL, Text(EVIL)))
        made.print(EVIL, markup=False)
        assert harmless(sheet.getvalue()) and "\x1b[31m" in sheet.getvalue()


def test_what_workers_print_is_text_on_a_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sheet = io.StringIO()
    for rank_0_only in (False, True):
        show = output.shower(Console(file=sheet, force_terminal=True), rank_0_only)
        show(0, f"\x1b[32mx\x1b[0m{EVIL}", False)
    assert harmless(sheet.getvalue()) and "\x1b[32m" in sheet.getvalue()
    output.shower(Console(file=sheet))(0, f"x{CLEAR}", False)  # into a file: as it is
    assert capsys.readouterr().out == f"[0] x{CLEAR}\n"
    path = tmp_path / "err"
    path.write_text(
        f"Traceback (most recent call last):\n  File x\nValueError: {TITLE}{CLEAR}odd\x1b\n", encoding="utf-8"
    )
    assert failure.error_lines(path, 0)[0] == "ValueError: odd␛"
