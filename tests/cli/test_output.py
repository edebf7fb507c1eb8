# SPDX-License-Identifier: Apache-2.0
"""What workers print, who is to blame, and the status line: without starting anybody."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import paceline
from paceline.cli.launch.messages import Messages
from paceline.cli.run import failure, output
from paceline.cli.run.status import describe
from paceline.observe.reports.live import LiveSnapshot
from paceline_plugins.sites.process import OutputFiles, Process

Shown = list[tuple[int, str, bool]]

TRACEBACK = """\
a warning
[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 3, in <module>
[rank2]:     f()
[rank2]: ValueError: odd
[rank2]: and so on
a library's warning at exit
"""


@pytest.fixture
def shown() -> Shown:
    return []


@pytest.fixture
def tails(shown: Shown, tmp_path: Path) -> output.Tails:
    (tmp_path / "out").touch()
    (tmp_path / "err").touch()
    found = output.Tails(lambda rank, line, is_error: shown.append((rank, line, is_error)))
    found.follow(3, tmp_path / "out", tmp_path / "err")
    return found


def test_lines_are_shown_whole_and_once(tails: output.Tails, shown: Shown, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"one\ntw")
    tails.read()
    assert shown == [(3, "one", False)]
    out.write_bytes(b"one\ntwo\nthree")
    tails.read()
    assert shown[1:] == [(3, "two", False)]
    tails.finish()
    tails.finish()
    assert shown[2:] == [(3, "three", False)]


def test_lines_are_made_readable() -> None:
    assert output.decode(b" 10%\r 50%\r100%", 0) == "100%"
    assert output.decode(b"windows\r", 0) == "windows"
    assert output.decode(b"[rank4]: ValueError", 4) == "ValueError"
    assert output.decode(b"[rank3]: of another", 4) == "[rank3]: of another"
    assert output.decode(b"\xff", 0) == "\ufffd"


def test_markup_in_a_workers_line_is_not_ours() -> None:
    sheet = StringIO()
    output.shower(Console(file=sheet, width=20, force_terminal=True, color_system=None))(
        1, "loss [bold]1.5[/] " + "x" * 30, False
    )
    assert sheet.getvalue() == "[1] loss [bold]1.5[/] " + "x" * 30 + "\n"


def test_the_exception_is_found_among_the_last_words(tmp_path: Path) -> None:
    path = tmp_path / "err"
    path.write_text(TRACEBACK)
    headline, tail = failure.error_lines(path, 2)
    assert headline == "ValueError: odd"
    assert tail[0] == "Traceback (most recent call last):"
    assert tail[-2:] == ["and so on", "a library's warning at exit"]


def test_the_cause_is_blamed_and_not_its_echo(tmp_path: Path) -> None:
    texts = {
        0: "RuntimeError: [gloo] Connection closed by peer [10.0.0.2]",
        1: "paceline.errors.PeerLostError: rank 2 did not answer",
        2: "ValueError: odd",
        3: "",
    }
    files = {rank: tmp_path / str(rank) for rank in texts}
    for rank, text in texts.items():
        files[rank].write_text(text)
    assert failure.culprit({0: 1, 1: 1, 2: 1}, files) == 2
    assert failure.culprit({0: 1, 1: 1, 2: 1, 3: -9}, files) == 3
    assert failure.culprit({0: 1, 1: 1}, files) == 0


@pytest.mark.parametrize(
    ("code", "says"),
    [(-9, "dmesg"), (-11, "PYTHONFAULTHANDLER"), (-15, "find out which process sent it"), (1, "correct")],
)
def test_the_panel_says_what_to_do(tmp_path: Path, code: int, says: str) -> None:
    path = tmp_path / "err"
    path.write_text(TRACEBACK)
    sheet = StringIO()
    Console(file=sheet, width=100).print(failure.panel(2, code, path, 3))
    assert says in sheet.getvalue()
    assert "ValueError: odd" in sheet.getvalue()
    assert "the other 3 here were stopped" in sheet.getvalue()


def test_progress_bars_are_shown_of_one_worker(shown: Shown, tmp_path: Path) -> None:
    """They stay in the files of the other ones."""
    tails = output.Tails(lambda rank, line, is_error: shown.append((rank, line, is_error)))
    for rank in (4, 5):
        for kind in ("out", "err"):
            (tmp_path / f"{rank}.{kind}").write_bytes(b"a line\r\n 0%|\r 50%|\r100%|\nend\n 1%|\r 2%|")
        tails.follow(rank, tmp_path / f"{rank}.out", tmp_path / f"{rank}.err")
    tails.finish()
    for is_error in (False, True):
        assert [line for rank, line, kind in shown if rank == 4 and kind is is_error] == [
            "a line",
            "100%|",
            "end",
            " 2%|",
        ]
        assert [line for rank, line, kind in shown if rank == 5 and kind is is_error] == ["a line", "end"]


def test_the_status_line_begins_with_what_matters_and_is_whole() -> None:
    shot = LiveSnapshot(4, "bmuf()", {0: 600, 1: 634}, 411.6, 3, 0.5, 1.49834, 0.042)
    front = "loss 1.4983 | efficiency 96 % | 412 minibatches/s | "
    assert describe(shot, 4).plain == front + "epoch 3 (50 %) | 1,234 minibatches"
    known = describe(replace(shot, whole=(0.35, 130.0)), 4).plain
    assert known == front + "35 % of the run, 2 min 10 s left"
    assert " | 10 % of the run | " in describe(replace(shot, whole=(0.1, None)), 4).plain  # no pace yet, no guess
    pushing = replace(shot, epoch=None, delay=2.9444, lost=(2, 5), data_share=0.125, effective=1.9)
    assert describe(pushing, 4).plain == front + "lost: workers 2, 5 | waiting for data 12 %"  # 1.9 does not fit
    assert "1.9 effective workers of 4" in describe(replace(pushing, data_share=0.01, loss=None), 4).plain
    assert describe(LiveSnapshot(), 4).plain == "4 workers running, none attached yet"


def test_output_whose_directory_was_removed_is_shown_to_its_end(
    tails: output.Tails, shown: Shown, tmp_path: Path
) -> None:
    tails.finish()
    shown.clear()
    out, err = tmp_path / "a" / "out", tmp_path / "a" / "err"
    out.parent.mkdir()
    with out.open("wb") as file:
        err.touch()
        tails.follow(7, out, err)
        file.write(b"one\ntw")
        file.flush()
        tails.read()
        shutil.rmtree(out.parent)
        file.write(b"o\nthree")
    tails.finish()
    tails.follow(8, tmp_path / "never", tmp_path / "made", from_now=True)
    tails.finish()
    assert shown == [(7, "one", False), (7, "two", False), (7, "three", False)]


@pytest.mark.processes
def test_a_keeper_whose_notes_find_no_place_tells_by_its_own_end(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = OutputFiles.of(tmp_path / "file" / "output", 0, 1)
    for program, code in (("exit 7", 7), ("kill -9 $$", -9)):
        process = Process.start(["sh", "-c", program], os.environ, files)
        os.waitid(os.P_PID, process.identity.pid, os.WEXITED | os.WNOWAIT)
        assert process.poll() == code


def trace(*frames: str, end: str) -> list[str]:
    """A traceback through functions of some files."""
    lines = [line for path in frames for line in (f'  File "{path}", line 3, in f', "    f(x)", "    ^^^^")]
    return ["Traceback (most recent call last):", *lines, end]


TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
OURS = str(Path(paceline.__file__).parent / "run" / "run.py")


def test_frames_that_are_not_the_users_are_folded(tmp_path: Path) -> None:
    path = tmp_path / "err"
    frames = ["<frozen runpy>", OURS, "/home/me/train.py", TORCH, TORCH, OURS, "/home/me/net.py", TORCH]
    path.write_text("\n".join(trace(*frames, end="ValueError: odd")))
    words, tail = failure.error_lines(path, 0)
    assert words == "ValueError: odd"
    assert [line for line in tail if "File" in line or "..." in line] == [
        "  ... 2 frames of Python, paceline",
        '  File "/home/me/train.py", line 3, in f',
        "  ... 3 frames of torch, paceline",
        '  File "/home/me/net.py", line 3, in f',
        "  ... 1 frame of torch",
    ]
    path.write_text("\n".join(trace(OURS, TORCH, end="ValueError: ours")))  # nothing of the user's to show
    assert sum("File" in line for line in failure.error_lines(path, 0)[1]) == 2


def failing(tmp_path: Path, shown: Shown, failed: bool) -> list[str]:
    """What is shown of two workers that print the same traceback, of which one goes on."""
    tails = output.Tails(lambda rank, line, is_error: shown.append((rank, line, is_error)), lambda: 0.0)
    (tmp_path / "0.out").unlink(missing_ok=True)
    for rank in (0, 1):
        tails.follow(rank, tmp_path / f"{rank}.out", tmp_path / f"{rank}.err")
        (tmp_path / f"{rank}.err").write_text(
            "\n".join(["before", *trace("/home/me/a.py", end="ValueError"), "after\n"])
        )
    tails.read()
    (tmp_path / "0.out").write_text("goes on\n")
    tails.read()
    tails.finish(failed)
    return [line for rank, line, _ in shown if rank == 1]


def test_the_traceback_of_a_worker_that_fails_is_left_to_the_panel(tmp_path: Path, shown: Shown) -> None:
    assert failing(tmp_path, shown, True) == ["before"]
    lines = [line for rank, line, _ in shown if rank == 0]
    assert lines[0] == "before" and lines[-2:] == ["after", "goes on"] and len(lines) == 8
    shown.clear()
    assert len(failing(tmp_path, shown, False)) == 7


def test_messages_of_workers_are_counted_and_not_shown() -> None:
    messages = Messages()
    assert messages.shown(1, "paceline: train.py:3: split among 2 workers", True) == ""
    for chosen in ("auto: bmuf(period=8): 1 s. To repeat: a", "auto: bmuf(period=9): 3 s. To repeat: b", "auto: int8"):
        assert messages.shown(0, f"paceline: warning: {chosen}", True) == chosen
    assert messages.shown(0, "paceline: warning: few blocks: so few [rank 0 of 4 on vm]", True) == "few blocks: so few"
    for rank in (0, 1, 1):
        messages.shown(rank, f"paceline: warning: the disk is full [rank {rank} of 2 on vm]", True)
        messages.shown(rank, f"paceline: warning: the contribution of worker 1 was rejected in {rank} of 3", True)
    assert messages.choices == 2
    assert messages.warnings == [
        "the disk is full (2 times)",
        "the contribution of worker 1 was rejected in 1 of 3 (2 times)",
    ]
    for line in ("epoch 1: loss 0.5, val loss 0.4", "epoch 2: loss: 2.5e-1", "a test", "validated"):
        assert messages.shown(0, line, False) == line and messages.shown(1, "loss 7", False)
    assert (messages.loss, messages.held_out) == ("2.5e-1", "epoch 1: loss 0.5, val loss 0.4")
