# SPDX-License-Identifier: Apache-2.0
"""`paceline watch`: all workers of a run, live, from any terminal that can read its logs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from paceline.cli.console import err, near, out, refuse
from paceline.cli.run.checks import LOGS
from paceline.cli.run.status import POLL_EVERY_S, Redrawn, describe
from paceline.extensions import PAGES, extension
from paceline.observe.reports.elastic_events import CONTROL_LOG
from paceline.observe.reports.live import Follower, Live, LiveSnapshot
from paceline.observe.reports.read import LOG_NAME
from paceline.observe.reports.summary import count_text, rate_text, seconds_text, value_text

OUTPUT = "output"
"""Exists before the first worker has attached."""
EVENTS_SHOWN = 6
"""Newest events that are shown."""
WAIT_S = 600.0
"""For a run to begin."""
LINE_EVERY_S = 10.0
"""Interval of lines without a terminal."""
BARS = "▁▂▃▄▅▆▇█"
DEAD = dict.fromkeys(("lost", "failed", "dead"), "bold red")
STYLES = {**DEAD, "no log": "red", "silent": "yellow", "closed": "dim"}


def command(
    run: Annotated[
        Path, typer.Argument(help="Log directory of a run, or its parent directory: the newest run there.")
    ] = Path(LOGS),
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit, for scripts.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a page for a browser, on this machine alone.")] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the page; default 8765, or any that is free.", show_default=False),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Serve the page at this address, for other machines: all who know the printed address may read."
        ),
    ] = "127.0.0.1",
) -> None:
    """Watch all workers of a run, in the terminal or in a browser."""
    if not web and (port is not None or host != "127.0.0.1"):
        refuse("--port and --host are of the page: add --web")
    if web and once:
        refuse("--once is of the view in the terminal; `paceline report` writes the page as a file")
    try:
        directory = newest_run(run) if once else wait_for_run(run, WAIT_S)
    except KeyboardInterrupt:
        return
    if web:
        extension(PAGES, "watch")(directory, host, port)
        return
    live = Live(directory)
    console = out()
    live.poll()
    if once or live.over:
        console.print(view(live, console))
        return
    try:
        if console.is_terminal:
            _on_terminal(live, console)
        else:
            _in_lines(live, console)
    except KeyboardInterrupt:
        return


def wait_for_run(path: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> Path:
    """The run at `path`, once it logs; refuses after so many seconds."""
    until, printed = clock() + seconds, False
    while (result := _find(path)) is None and clock() < until:
        if path.exists() and not path.is_dir():
            break
        if not printed:
            printed = True
            text = f"no run logs in {near(path)} yet: waiting for one (Ctrl-C ends it)"
            err().print(text, markup=False, soft_wrap=True)
        time.sleep(POLL_EVERY_S)
    return newest_run(path) if result is None else result


def newest_run(path: Path) -> Path:
    """The run at `path`, or the newest one in it."""
    result = _find(path)
    if result is not None:
        return result
    if not path.is_dir():
        refuse(f"{path} {'is a file' if path.exists() else 'does not exist'}; give the log directory of a run")
    refuse(f"no run has logs in {near(path)} or below it; start one with paceline run, or give its log directory")


def _find(path: Path) -> Path | None:
    if _modified_at(path):
        return path
    with contextlib.suppress(OSError):
        result = {inner: _modified_at(inner) for inner in path.iterdir() if inner.is_dir()}
        return max((inner for inner in result if result[inner]), key=result.__getitem__, default=None)
    return None


def _modified_at(directory: Path) -> float:
    """When a run in this directory last logged, in seconds of the wall clock; 0 without a run."""
    times = [0.0]
    with contextlib.suppress(OSError):  # removed, or not a directory
        for file in directory.iterdir():
            if LOG_NAME.fullmatch(file.name) or file.name in (CONTROL_LOG, OUTPUT):
                times.append(file.stat().st_mtime)
    return max(times)


def _on_terminal(live: Live, console: Console) -> None:
    with Screen(Redrawn(lambda: view(live, console)), console=console, transient=True, refresh_per_second=4):
        while not live.over:
            time.sleep(POLL_EVERY_S)
    live.poll()
    console.print(view(live, console))


def _in_lines(live: Live, console: Console) -> None:
    """Without a terminal: print events at once, and the status every `LINE_EVERY_S`."""
    printed: set[str] = set()
    printed_at = -LINE_EVERY_S
    while True:
        shot = live.poll()
        for item in live.notices.newest(50):
            if item.key not in printed:
                printed.add(item.key)
                console.print(f"{seconds_text(item.at_s)}: {item.text}", soft_wrap=True, markup=False)
        if live.over:
            console.print(view(live, console))
            return
        if time.monotonic() - printed_at >= LINE_EVERY_S:
            printed_at = time.monotonic()
            console.print(describe(shot, shot.size).plain, soft_wrap=True, markup=False)
        time.sleep(POLL_EVERY_S)


def view(live: Live, console: Console, clock: Callable[[], float] = time.time) -> RenderableType:
    """One page: the run, its loss, its workers, its events."""
    shot = live.poll()
    width, height = console.width, console.height if console.is_terminal else 10_000
    parts: list[RenderableType] = [*_head(live, shot, width), workers_table(live, shot, width, height - 10, clock())]
    news = live.notices.newest(EVENTS_SHOWN)
    if news:
        below = Table.grid(padding=(0, 1))
        below.add_column(justify="right", style="dim", no_wrap=True)
        for item in news:
            below.add_row(seconds_text(item.at_s), Text(item.text))
        parts += [Text(""), below]
    return Group(*parts)


def _head(live: Live, shot: LiveSnapshot, width: int) -> list[RenderableType]:
    block = max((log.block for log in live.workers), default=0)
    at_s = max((log.at_s + log.ahead_s for log in live.workers), default=0.0)
    title = [live.directory.resolve().name, shot.rule or "no worker has attached yet"]
    title += [f"block {block:,}"] if block else []
    title += [f"after {seconds_text(at_s)}"] if at_s else []
    lines: list[RenderableType] = [Text(" | ".join(title), style="bold", no_wrap=True, overflow="ellipsis")]
    lines.append(Text(describe(shot, shot.size).plain, no_wrap=True, overflow="ellipsis") if shot.size else Text(""))
    curve = loss_curve(live.workers)
    if curve:
        label = f"loss {value_text(curve[0])} to {value_text(curve[-1])} "
        lines.append(Text.assemble(label, (sparkline(curve, max(8, min(60, width - len(label) - 1))), "cyan")))
    return lines


def loss_curve(workers: list[Follower]) -> list[float]:
    """The mean of the workers' loss curves, at the number of points of the shortest."""
    curves = [log.curve for log in workers if len(log.curve) > 1]
    if not curves:
        return []
    points = min(len(curve) for curve in curves)
    picked = [[curve[k * (len(curve) - 1) // (points - 1)] for k in range(points)] for curve in curves]
    return [sum(column) / len(column) for column in zip(*picked, strict=True)]


def sparkline(values: list[float], width: int) -> str:
    """Values as bars, at most `width`, scaled to the finite ones."""
    if len(values) > width:
        cuts = [k * len(values) // width for k in range(width + 1)]
        values = [sum(values[low:high]) / (high - low) for low, high in pairwise(cuts)]
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if abs(value) < float("inf") else "!" for value in values)


def workers_table(live: Live, shot: LiveSnapshot, width: int, rows: int, now: float) -> RenderableType:
    """A row a worker; if they do not fit, those that are not at work first."""
    counted = any(log.samples for log in live.workers)
    ranks = range(max([shot.size, *(log.rank + 1 for log in live.workers)]))
    excluded = {rank: max((log.left_out[rank] for log in live.workers), default=0) for rank in ranks}
    table = _columns(width, counted, any(excluded.values()))
    by_rank = {log.rank: log for log in live.workers}
    states = {rank: state(rank, by_rank.get(rank), shot, now) for rank in ranks}
    order = sorted(states, key=lambda rank: (states[rank] == "at work", rank)) if len(states) > rows else list(states)
    for rank in order[: max(rows, 1)]:
        log = by_rank.get(rank)
        cells = _numbers(log, counted, now) if log is not None else [""] * 6
        if any(excluded.values()):
            cells.insert(5, count_text(excluded[rank]))
        label = Text(states[rank], STYLES.get(states[rank], ""))
        if width < NARROW:
            table.add_row(str(rank), label, *cells[:2])
        else:
            table.add_row(str(rank), Text(log.host if log else "?"), label, *cells)
    if len(order) > rows:
        return Group(table, Text(f"and {len(order) - rows} more", style="dim"))
    return table


NARROW = 64
"""A terminal with fewer columns shows only the first two numbers of a worker."""


def _columns(width: int, counted: bool, excluded: bool) -> Table:
    if width < NARROW:
        return Table("worker", "state", "batches", "/s", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table = Table(box=None, pad_edge=False, padding=(0, 1 if width < 100 else 2, 0, 0))
    table.add_column("worker", justify="right")
    table.add_column("host", no_wrap=True, max_width=12 if width < 100 else 24)
    table.add_column("state", no_wrap=True)
    names = ["minibatches", "samples/s" if counted else "batches/s", "exchange", "wait", "data"]
    for name in [*names, *(["rejected"] if excluded else []), "last word"]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _numbers(log: Follower, counted: bool, now: float) -> list[str]:
    parts = log.shares
    cells = [count_text(log.minibatches), rate_text(log.samples_per_s if counted else log.rate)]
    cells += [f"{100 * part:.0f} %" for part in (parts.exchange, parts.wait, parts.data)]
    return [*cells, "" if log.closed else f"{seconds_text(max(0.0, round(now - log.touched_s)))} ago"]


SILENT_S = 30.0
"""A worker is shown as silent if its log has not grown for so long; it may be in a long block."""


def state(rank: int, log: Follower | None, shot: LiveSnapshot, now: float) -> str:
    """A worker's state, from all logs."""
    if log is not None and log.closed and not log.failed:
        return "closed"
    if rank in shot.lost:
        return "lost"
    if log is None:
        return "no log"
    if log.failed:
        return "failed"
    if log.closed:
        return "closed"
    if log.dead(lambda: now):
        return "dead"
    return "silent" if now - log.touched_s > SILENT_S else "at work"
