# SPDX-License-Identifier: Apache-2.0
"""`paceline dual`: a training's page and its live view; what is no training is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline_dual.commands import watch as watching
from paceline_dual.words import Words
from test_dual_report import rewarded, row, saved, tried

ROWS = (
    row(0, translations=[tried([0]), tried([], "backward")], phase="warm"),
    row(2, translations=[tried([1]), tried([0, 1], "backward")], phase="warm"),
    row(9, forward=-1.0, backward=-2.0, rewards=rewarded(-1.25), translations=[tried([1, 0]), tried([0], "backward")]),
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["dual", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_page_is_one_file_with_curves_and_translations(tmp_path: Path) -> None:
    Words(("<i>one</i>", "two"), ("un", "deux")).save(tmp_path / "words.json")
    result = run("report", saved(tmp_path, *ROWS))
    assert result.exit_code == 0 and "report.html" in result.output, result.output
    page = (tmp_path / "report.html").read_text()
    for part in (
        "x → y",
        "Rewards",
        "Gap",
        "deux un",
        "&lt;i&gt;one&lt;/i&gt; two",
        "(nothing)",
        "✓",
        "bmuf(period=4)",
    ):
        assert part in page, part
    assert page.count("<svg") == 4 and "<i>one" not in page
    assert not re.search(r'(src|href)="(https?:|[^#"])', page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_page_without_rewards_and_with_words_from_elsewhere(tmp_path: Path) -> None:
    Words(("here", "there")).save(tmp_path / "mine.json")
    plain = [row(step, exact_forward=None, forward=-5.0 + step, translations=[tried([1])]) for step in (0, 2, 9)]
    assert run("report", saved(tmp_path, *plain), "--words", tmp_path / "mine.json").exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2 and "<h2>Rewards" not in page
    assert "<p><span>x (source)</span> here there</p>" in page
    assert "<p><span>y (reference)</span> 1 0</p>" in page  # which has no names


def test_a_training_that_diverged_has_a_page_too(tmp_path: Path) -> None:
    lost = {"forward": float("nan"), "backward": float("-inf"), "gap": float("nan"), "gap_rms": float("inf")}
    assert run("report", saved(tmp_path, ROWS[0], row(9, **lost))).exit_code == 0
    assert (
        "The forward model&#x27;s mean log P(y | x) of held-out pairs is nan" in (tmp_path / "report.html").read_text()
    )
    assert "nan" in run("watch", tmp_path, "--once").output


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_folder_without_a_training_is_refused(command: str, tmp_path: Path) -> None:
    result = run(command, tmp_path)
    assert result.exit_code == 2 and "has a training of a pair begun there?" in result.output
    (tmp_path / "history.json").write_text("[")
    assert run(command, tmp_path).exit_code == 2


def test_one_view_of_a_training(tmp_path: Path) -> None:
    saved(tmp_path, *ROWS, over=False)
    result = run("watch", tmp_path, "--once")
    assert result.exit_code == 0 and "2 workers | bmuf(period=4) | evaluated at step 9 of 9" in result.output
    assert "-1.25" in result.output and "|gap|" in result.output


def test_watching_goes_on_until_the_training_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, *ROWS[:1], over=False)
    later = iter([(ROWS[:2], False), (ROWS, True)])

    def wait(seconds: float) -> None:
        rows, over = next(later)
        saved(tmp_path, *rows, over=over)

    monkeypatch.setattr(watching.time, "sleep", wait)
    result = run("watch", tmp_path)
    assert result.exit_code == 0
    assert [line.split(" |")[0] for line in result.output.splitlines()] == ["step 0", "step 2", "step 9"]


@pytest.mark.processes
def test_help_loads_no_torch() -> None:
    program = (
        "import sys; from paceline_dual.commands.command import app; "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
