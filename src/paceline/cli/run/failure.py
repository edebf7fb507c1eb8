# SPDX-License-Identifier: Apache-2.0
"""Find the worker that failed first, and report it in one panel."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from paceline.cli.console import error_panel, near
from paceline.cli.run.output import decode
from paceline.cli.run.tracebacks import BEGINS, folded, without_rank
from paceline.observe.printable import plain
from paceline.observe.reports.read import LOG_NAME
from paceline.observe.reports.summary import ranks_text

LOST = 3
"""Exit code of a run that ended without some of its workers."""
TAIL_LINES = 12
TAIL_BYTES = 1 << 16
# A worker with such an error lost its connection to another one, which is the cause.
PEER_LOST = re.compile(r"PeerLostError|Connection (reset|closed|refused)|Broken pipe|DistNetworkError|ncclRemoteError")


def culprit(codes: Mapping[int, int], stderr_of: Mapping[int, Path]) -> int:
    """The rank that failed first, of those that failed within one poll.

    A worker that was killed by a signal comes first, then one that raised an error of its own, then one that lost its
    connection to another.
    """

    def blame(rank: int) -> tuple[int, int]:
        if codes[rank] < 0:
            return 0, rank
        headline, _ = error_lines(stderr_of[rank], rank)
        return (2 if PEER_LOST.search(headline) else 1), rank

    return min(codes, key=blame)


def exit_code(code: int) -> int:
    """The exit code of a shell: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def may_lose(directory: Path, rank: int) -> bool:
    """Whether the run continues without this worker: its log says that it attached under an asynchronous rule."""
    from paceline.rules.recipes import rule_from_text  # here, because torch loads for seconds and --help must not wait

    try:
        names = [(int(match[2] or 1), name) for name in os.listdir(directory) if (match := LOG_NAME.fullmatch(name))
                 and int(match[1]) == rank]  # fmt: skip
        with (directory / max(names, default=(0, "none"))[1]).open(encoding="utf-8") as file:
            first = file.readline()
        event = json.loads(first)
        text = event["rule"]
        asynchronous = text.startswith("custom(Bounded(") or rule_from_text(text).schedule.survives_loss
        return event["kind"] == "attach" and event["size"] > 1 and asynchronous
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no line yet, or another version's
        return False


def exit_text(code: int) -> str:
    """How a process failed."""
    return f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"


def same_error_ranks(rank: int, codes: Mapping[int, int], stderr_of: Mapping[int, Path]) -> list[int]:
    """The ranks with the same error as `rank`, including itself: those that failed, too, or wrote a traceback."""
    ranks = [other for other in stderr_of if other in codes or _has_traceback(stderr_of[other], other)]
    errors = {other: without_rank(error_lines(stderr_of[other], other)[0], other) for other in ranks}
    return [other for other in sorted(errors) if other == rank or (errors[rank] and errors[other] == errors[rank])]


def panel(
    rank: int,
    code: int,
    stderr: Path,
    stopped: int,
    verdict: str = "failed",
    ranks: Sequence[int] = (),
    host: str | None = None,
) -> Panel:
    """The report of a failed worker, with its exception first; all of `ranks` have the same error; `host`: its own."""
    words, tail = error_lines(stderr, rank)
    how = exit_text(code)
    if code < 0 and words:  # the signal matters more than the last line
        tail = [*tail, words]
    headline = words if code > 0 and words else how
    facts = [] if headline == how else [how]
    if stopped:
        here = " here" if host is None else ""
        facts.append(f"the other {stopped}{here} {'was' if stopped == 1 else 'were'} stopped")
    parts = [Text(headline, style="bold red")]
    if tail:
        parts.append(Text("\n".join(["", *tail, ""]), style="dim"))
    where = f"all it wrote to stderr: {near(stderr)}"
    if not stderr.exists():
        where = f"{near(stderr)} is missing: see what it wrote above"
    below = ["; ".join(facts), advice(code, words), where]
    parts.append(Text("\n".join(line for line in below if line), style="default"))
    return error_panel(f"{ranks_text(ranks or [rank])} on {host or socket.gethostname()} {verdict}", *parts)


def advice(code: int, headline: str) -> str:
    """The next step for the user."""
    if code == -signal.SIGKILL:
        return (
            "SIGKILL comes from outside the program, most often from the kernel when memory runs "
            "out: look at `dmesg`, then use fewer workers or smaller minibatches"
        )
    if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL):
        return "it crashed in native code: PYTHONFAULTHANDLER=1 shows where in a Python program, gdb in others"
    if code < 0:
        return "the signal came from outside the program: find out which process sent it"
    if PEER_LOST.search(headline):
        return "it lost another worker: see the output of the launchers on the other hosts"
    return "correct the program, then run it again"


def signal_name(number: int) -> str:
    """`SIGKILL (9)`."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def error_lines(stderr: Path, rank: int) -> tuple[str, list[str]]:
    """The exception's lines, and some lines before and after them.

    The exception starts at the first line after the traceback that is not indented, and includes indented lines below
    it; libraries may print warnings after it. Without a traceback it is the last line.
    """
    lines = _tail(stderr, rank)
    starts = [i for i, line in enumerate(lines) if line.startswith(BEGINS)]
    if not starts:
        return (lines[-1], lines[-TAIL_LINES:-1]) if lines else ("", [])
    end = next((i for i in range(starts[-1] + 1, len(lines)) if not lines[i].startswith(" ")), None)
    if end is None:  # cut off within the traceback
        return lines[-1].strip(), lines[-TAIL_LINES:-1]
    after = end + 1
    while after < len(lines) and lines[after].startswith("    "):  # a message of several lines
        after += 1
    trace = folded(lines[starts[-1] : end])
    kept = trace if len(trace) <= TAIL_LINES else [trace[0], *trace[1 - TAIL_LINES :]]
    return "\n".join(lines[end:after]), [*kept, *lines[after:][:4]]


def _has_traceback(stderr: Path, rank: int) -> bool:
    return any(line.startswith(BEGINS) for line in _tail(stderr, rank))


def _tail(path: Path, rank: int) -> list[str]:
    lines: list[bytes] = []
    with contextlib.suppress(OSError), path.open("rb") as file:  # the log directory may have been removed
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        lines = file.read().split(b"\n")
    return [text for text in (plain(decode(line, rank)).rstrip() for line in lines) if text]
