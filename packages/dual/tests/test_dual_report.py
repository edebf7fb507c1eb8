# SPDX-License-Identifier: Apache-2.0
"""What a report tells of a training, what the live view draws, and the words of both sides."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline import CheckpointError
from paceline_dual import show
from paceline_dual.report import History, translations, warnings, words_of
from paceline_dual.words import UNKNOWN, Words


def row(step: int, **more: Any) -> dict[str, Any]:
    """A row of a history."""
    plain = {"forward": -2.0, "backward": -3.0, "prior_x": -9.0, "prior_y": -8.0, "gap": 1.0, "gap_rms": 1.5}
    plain |= {"exact_forward": 0.5, "exact_backward": None, "seconds": 1.0}
    rewards: dict[str, Any] = {"forward": None, "backward": None}
    return {"step": step, "phase": "dual", **plain, "rewards": rewards, "translations": [], **more}


def rewarded(r: float) -> dict[str, Any]:
    return {"forward": {"r1": -5.0, "r2": -1.0, "r": r}, "backward": None}


def tried(output: Any, direction: str = "forward", r: float = -1.0) -> dict[str, Any]:
    sides = ([0, 1], [1, 0]) if direction == "forward" else ([1, 0], [0, 1])
    about = {"direction": direction, "source": sides[0], "reference": sides[1]}
    return {**about, "output": output, "r1": -4.0, "r2": -2.0, "r": r}


def history(*rows: dict[str, Any], over: bool = True) -> History:
    return History(list(rows), "dual", 2, 9, over, 2, "bmuf(period=4)")


def saved(folder: Path, *rows: dict[str, Any], over: bool = True) -> Path:
    about = {"workers": 2, "rule": "bmuf(period=4)", "method": "dual", "warm": 2, "steps": 9, "over": over}
    (folder / "history.json").write_text(json.dumps({**about, "rows": rows}))
    return folder


def test_a_history_is_read(tmp_path: Path) -> None:
    found = History.load(saved(tmp_path, row(0), row(2), row(9)))
    assert found == history(row(0), row(2), row(9)) and found.start["step"] == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rows": []}',
        '{"rows": [{"step": 1}]}',
        '{"rows": 3}',
        json.dumps({"rows": [row(0, gap="<b>")]}),
    ],
)
def test_what_is_no_history_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        History.load(tmp_path)
    (tmp_path / "history.json").write_text(text)
    with pytest.raises(CheckpointError, match="of a pair"):
        History.load(tmp_path)


def test_outputs_of_one_source_stand_together_and_the_same_ones_once() -> None:
    words = Words(("a", "b"), ("A", "B"))
    rows = (
        row(0, translations=[tried([]), tried([0], "backward")]),
        row(2, translations=[tried([1]), tried([0, 1], "backward")]),
        row(4, translations=[tried([1], r=-0.5), tried([0, 1], "backward")]),
        row(9, translations=[tried([1, 0]), tried([0], "backward")]),
    )
    there, back = translations(history(*rows), words)
    assert (there.direction, there.source, there.reference) == ("forward", "a b", "B A")
    assert [(one.first, one.last, one.output, one.right) for one in there.attempts] == [
        (0, 0, "", False),
        (2, 4, "B", False),
        (9, 9, "B A", True),
    ]
    assert there.attempts[1].r == -0.5  # of the last of them
    assert (back.source, back.reference) == ("B A", "a b")
    assert [(one.first, one.last, one.right) for one in back.attempts] == [(0, 0, False), (2, 4, True), (9, 9, False)]


def test_a_reader_is_warned() -> None:
    assert warnings(history(row(0), row(2), row(9, forward=-1.0, backward=-1.0))) == []
    assert warnings(history(row(0), over=False)) == ["The training is not over: step 0 of 9."]
    (worse,) = warnings(history(row(0), row(2), row(9, forward=-1.0, backward=-4.0)))
    assert "backward" in worse and "-4, below the -3 " in worse
    better = {"forward": -1.0, "backward": -1.0}
    cheats = (row(4, **better, rewards=rewarded(-6.0)), row(9, **better, rewards=rewarded(-2.0), exact_forward=0.4))
    (cheat,) = warnings(history(row(2), *cheats))
    assert "forward direction rose and the share of right outputs fell" in cheat


def test_words_of_both_sides(tmp_path: Path) -> None:
    words = Words(("ä", "<b>"), None, "")
    assert words.text("x", [1, 0, 0]) == "<b>ää" and words.text("y", [3, 1]) == "3 1"
    assert words.text("x", [0, 2, -1]) == f"ä{UNKNOWN}{UNKNOWN}" and words.text("y", 4) == "4"
    assert Words(y=("bad", "good")).text("y", 1) == "good" and words.text("x", "4 numbers") == "4 numbers"
    assert words_of(tmp_path) == Words()
    words.save(tmp_path / "words.json")
    Words(("other",)).save(tmp_path / "mine.json")
    assert words_of(tmp_path) == words and words_of(tmp_path, tmp_path / "mine.json") == Words(("other",))


@pytest.mark.parametrize("text", ["", "[]", '{"format": "x"}', '{"format": "paceline dual words 1", "x": [1]}'])
def test_what_are_no_words_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"words\.json"):
        Words.load(path)
    with pytest.raises(CheckpointError, match="cannot read the words"):
        words_of(tmp_path, tmp_path / "missing.json")


# -- the live view ----------------------------------------------------------------------------------


def test_lines_for_pipes() -> None:
    stream = io.StringIO()
    with show.shown(Console(file=stream, width=60)) as lines:
        assert isinstance(lines, show.Lines)
        lines.doing("warm", 1, 9)  # too early for a line
        lines.row(row(4, rewards=rewarded(-1.25)))
        lines.say("[over]")
    first, second = stream.getvalue().splitlines()
    assert (
        first == ("step 4 | x -> y log P -2, exact 50.0 %, reward -1.25 | y -> x log P -3 | gap 1 (rms 1.5)")
        and second == "[over]"
    )


def test_a_line_now_and_then_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "LINE_EVERY_S", -1.0)
    stream = io.StringIO()
    with show.shown(Console(file=stream)) as lines:
        lines.doing("dual", 3, 9, "7 steps/s")
    assert stream.getvalue() == "dual: 3 of 9 7 steps/s\n"


@pytest.mark.parametrize("width", [80, 140])
def test_a_view_on_a_terminal(width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=40)
    with show.shown(console) as live:
        assert isinstance(live, show.OnTerminal)
        live.row(row(0))
        live.row(row(4, rewards=rewarded(-1.25)))
        live.row(row(9, forward=float("nan"), rewards=rewarded(-1.0)))
        live.doing("dual", 9, 9)
        live.say("a note")
    text = stream.getvalue()
    for part in ("50.0 %", "-1.25", "reward x -> y", "|gap|", "a note", "nan"):
        assert part in text
    assert ("gap rms" in text) == (width == 140)


def test_bars() -> None:
    assert show.sparkline([0.0, 7.0], 8) == "▁█" and show.sparkline([1.0, 1.0], 8) == "▁▁"
    assert show.sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█" and show.sparkline([0.0, float("nan")], 8) == "▁!"
