# SPDX-License-Identifier: Apache-2.0
"""The status line at the bottom of the terminal during a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.cli.console import err
from paceline.observe.reports.live import Live, LiveSnapshot
from paceline.observe.reports.summary import delay_text, ranks_text, seconds_text, value_text

DATA_SHARE = 0.01
"""Waiting for data is shown above this share of the time."""
POLL_EVERY_S = 0.5  # the logs; workers flush theirs once a second
LINE_EVERY_S = 60.0  # without a terminal


class RunStatus:
    """Renders the newest snapshot; reads the logs at most every `POLL_EVERY_S`."""

    def __init__(self, live: Live, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.live, self.workers, self.clock = live, workers, clock
        self.spinner = Spinner("dots")
        self.snapshot = LiveSnapshot()
        self._read_at = -POLL_EVERY_S

    def __rich__(self) -> RenderableType:
        now = self.clock()
        if now - self._read_at >= POLL_EVERY_S:
            self.snapshot, self._read_at = self.live.poll(), now
        return self._line(self.snapshot)

    def _line(self, shot: LiveSnapshot) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [self.spinner]
        if shot.epoch_done is not None:
            cells.append(ProgressBar(total=1.0, completed=shot.epoch_done, width=20))
        cells.append(describe(shot, self.workers))
        row.add_row(*cells)
        return row


def _left(shot: LiveSnapshot) -> str:
    """How much of an epoch is done, and the time left."""
    if shot.epoch_done is None:
        return ""
    soon = "" if shot.epoch_left_s is None or shot.epoch_done >= 1.0 else f", {seconds_text(shot.epoch_left_s)} left"
    return f" ({100 * shot.epoch_done:.0f} %{soon})"


def _end(shot: LiveSnapshot) -> str:
    """When the run ends, as far as the program's loaders show."""
    done, left_s = shot.whole
    if done is None:
        return "end unknown"
    left = "" if left_s is None or done >= 1.0 else f", {seconds_text(left_s)} left"
    return f"{100 * done:.0f} % of the run{left}"


@contextlib.contextmanager
def lines(live: Live, workers: int, every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Context in which the status is printed now and then, where there is no terminal."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(every_s):
            err().print(
                f"{time.strftime('%H:%M:%S')}: {describe(live.poll(), workers).plain}", soft_wrap=True, markup=False
            )

    thread = threading.Thread(target=tell, name="paceline-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe(shot: LiveSnapshot, workers: int) -> Text:
    """A snapshot as text: `epoch 3 | 12,345 minibatches (412/s) | loss 1.4983 | ...`."""
    elastic = [] if shot.elastic_status is None else [shot.elastic_status.text]
    if not shot.size:
        none_yet = f"{workers} worker{'s' if workers > 1 else ''} running, none attached yet"
        return Text(" | ".join([none_yet, *elastic]), no_wrap=True, overflow="ellipsis")
    parts = [_end(shot)] + ([] if shot.epoch is None else [f"epoch {shot.epoch}{_left(shot)}"])
    parts.append(f"{shot.total:,} minibatches ({shot.minibatches_per_s:,.0f}/s)")
    if len(shot.minibatches) > 1:
        slowest, fastest = min(shot.minibatches.values()), max(shot.minibatches.values())
        if slowest != fastest:
            parts.append(f"{slowest:,} to {fastest:,} a worker")
    if shot.loss is not None:
        parts.append(f"loss {value_text(shot.loss)}")
    there = shot.size if shot.elastic_status is None else shot.elastic_status.members
    if shot.effective is not None and shot.effective <= there:  # else some have left since it was measured
        parts.append(f"{there} workers count as {shot.effective:.{0 if shot.effective >= 10 else 1}f}")
    parts.append(f"efficiency {100 * (1 - shot.exchange_share):.0f} %")  # the rest waits for others, or exchanges
    if shot.data_share > DATA_SHARE:
        parts.append(f"waiting for data {100 * shot.data_share:.0f} %")
    if shot.delay is not None:
        parts.append(f"delay {delay_text(shot.delay)}")
    if shot.lost:
        parts.append(f"lost: {ranks_text(shot.lost)}")
    return Text(" | ".join([*parts, *elastic]), style="bold", no_wrap=True, overflow="ellipsis")
