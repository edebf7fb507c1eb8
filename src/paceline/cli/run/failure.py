# SPDX-License-Identifier: Apache-2.0
"""Which worker failed first, and how to say it in one panel."""

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
from paceline.cli.run.tracebacks import folded, ranks_span, without_rank
from paceline.core.printable import plain
from paceline.observe.reports.read import LOG_NAME

LOST = 3
"""Exit code of a run that came to its end without some of its workers."""
TAIL_LINES = 12
TAIL_BYTES = 1 << 16
# What a worker says that only lost sight of another; the one that was lost is the cause.
ECHO = re.compile(r"PeerLostError|Connection (reset|closed|refused)|Broken pipe|DistNetworkError|ncclRemoteError")


def culprit(codes: Mapping[int, int], stderr_of: Mapping[int, Path]) -> int:
    """The rank to blame among those that failed within one look.

    A worker killed by a signal comes before one that raised, and one that raised on its own before
    one that complains about a lost peer.
    """

    def blame(rank: int) -> tuple[int, int]:
        if codes[rank] < 0:
            return 0, rank
        headline, _ = last_words(stderr_of[rank], rank)
        return (2 if ECHO.search(headline) else 1), rank

    return min(codes, key=blame)


def exit_code(code: int) -> int:
    """A process's return code as a shell tells it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def may_lose(directory: Path, rank: int) -> bool:
    """Whether the others go on without this worker: it had met them, under an asynchronous rule, as its log says."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no line yet, or of another paceline
        return False


def how_text(code: int) -> str:
    """How a process ended that should not have."""
    return f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"


def alike(rank: int, stderr_of: Mapping[int, Path]) -> list[int]:
    """The ranks that said the same as this one at their end, itself among them."""
    said = {other: without_rank(last_words(stderr_of[other], other)[0], other) for other in stderr_of}
    return [other for other in sorted(said) if other == rank or (said[rank] and said[other] == said[rank])]


def panel(
    rank: int, code: int, stderr: Path, stopped: int, verdict: str = "failed", ranks: Sequence[int] = ()
) -> Panel:
    """Everything a person needs to see, the exception's own line first; `ranks` all say the same."""
    words, tail = last_words(stderr, rank)
    how = how_text(code)
    if code < 0 and words:  # the signal is the news, whatever was printed last
        tail = [*tail, words]
    headline = words if code > 0 and words else how
    facts = [] if headline == how else [how]
    if stopped:
        facts.append(f"the other {stopped} here {'was' if stopped == 1 else 'were'} stopped")
    parts = [Text(headline, style="bold red")]
    if tail:
        parts.append(Text("\n".join(["", *tail, ""]), style="dim"))
    below = ["; ".join(facts), advice(code, words), f"all it wrote to stderr: {near(stderr)}"]
    parts.append(Text("\n".join(line for line in below if line), style="default"))
    return error_panel(f"{ranks_span(ranks or [rank])} on {socket.gethostname()} {verdict}", *parts)


def advice(code: int, headline: str) -> str:
    """What to do next."""
    if code == -signal.SIGKILL:
        return (
            "SIGKILL comes from outside the program, most often from the kernel when memory runs "
            "out: look at `dmesg`, then use fewer workers or smaller minibatches"
        )
    if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL):
        return "it crashed in native code: run again with PYTHONFAULTHANDLER=1 to see where"
    if code < 0:
        return "the signal came from outside the program: ask who sent it"
    if ECHO.search(headline):
        return "it lost another worker: look at what the launchers of the other hosts say"
    return "correct the program, then run it again"


def signal_name(number: int) -> str:
    """`SIGKILL (9)`."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def last_words(stderr: Path, rank: int) -> tuple[str, list[str]]:
    """The exception's lines and the last lines before and after them.

    After a traceback the exception's line is the first that is not indented, with what is indented below it; libraries
    like to add warnings of their own behind it. Without a traceback it is the last line.
    """
    lines = _tail(stderr, rank)
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if not starts:
        return (lines[-1], lines[-TAIL_LINES:-1]) if lines else ("", [])
    end = next((i for i in range(starts[-1] + 1, len(lines)) if not lines[i].startswith(" ")), None)
    if end is None:  # cut off within the traceback
        return lines[-1].strip(), lines[-TAIL_LINES:-1]
    behind = end + 1
    while behind < len(lines) and lines[behind].startswith("    "):  # a message of several lines
        behind += 1
    trace = folded(lines[starts[-1] : end])
    kept = trace if len(trace) <= TAIL_LINES else [trace[0], *trace[1 - TAIL_LINES :]]
    return "\n".join(lines[end:behind]), [*kept, *lines[behind:][:4]]


def _tail(path: Path, rank: int) -> list[str]:
    lines: list[bytes] = []
    with contextlib.suppress(OSError), path.open("rb") as file:  # the log directory may have been removed
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        lines = file.read().split(b"\n")
    return [text for text in (plain(decode(line, rank)).rstrip() for line in lines) if text]
