# SPDX-License-Identifier: Apache-2.0
"""The status line at the bottom of the terminal during a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.text import Text

from paceline.cli.console import err
from paceline.observe.reports.live import Live, LiveSnapshot
from paceline.observe.reports.summary import delay_text, ranks_text, seconds_text, value_text

DATA_SHARE = 0.01
"""Waiting for data is shown above this share of the time."""
POLL_EVERY_S = 0.5  # the logs; workers flush theirs once a second
LINE_EVERY_S = 60.0  # without a terminal
MOST_COLUMNS = 100


class Redrawn:
    """What a terminal shows of a run; reads the logs when it is drawn, at most every `POLL_EVERY_S`."""

    def __init__(self, draw: Callable[[], RenderableType], clock: Callable[[], float] = time.monotonic) -> None:
        self._draw, self._clock = draw, clock
        self._drawn: RenderableType = ""
        self._read_at = float("-inf")

    def __rich__(self) -> RenderableType:
        if self._clock() - self._read_at >= POLL_EVERY_S:
            self._drawn, self._read_at = self._draw(), self._clock()
        return self._drawn


@contextlib.contextmanager
def lines(live: Live, workers: int, every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Context in which the status is printed now and then, where there is no terminal."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            err().print(
                f"{time.strftime('%H:%M:%S')}: {describe(live.poll(), workers).plain}", soft_wrap=True, markup=False
            )

    thread = threading.Thread(target=repeat, name="paceline-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe(shot: LiveSnapshot, workers: int) -> Text:
    """A snapshot as text, what matters most first: `loss 1.4983 | efficiency 96 % | 412 minibatches/s | ...`."""
    elastic = [] if shot.elastic_status is None else shot.elastic_status.text.split(" | ")
    elastic.sort(key=lambda part: not part.startswith("waits"))
    if not shot.size:
        parts = [f"{workers} worker{'s' if workers > 1 else ''} running, none attached yet", *elastic]
    else:
        parts = [*_first(shot), *elastic, *_more(shot)]
    while len(text := " | ".join(parts)) > MOST_COLUMNS and len(parts) > 1:
        parts.pop()
    return Text(text, style="bold", no_wrap=True, overflow="ellipsis")


def _first(shot: LiveSnapshot) -> Iterator[str]:
    """Loss, efficiency, speed, lost workers."""
    if shot.loss is not None:
        yield f"loss {value_text(shot.loss)}"
    yield f"efficiency {100 * (1 - shot.exchange_share):.0f} %"  # the rest waits for others, or exchanges
    yield f"{shot.minibatches_per_s:,.0f} minibatches/s"
    if shot.lost:
        yield f"lost: {ranks_text(shot.lost)}"


def _more(shot: LiveSnapshot) -> Iterator[str]:
    """How much is done, the time left where it is known, and details."""
    done, left_s = shot.whole
    if done is not None:
        yield f"{100 * done:.0f} % of the run{_left(left_s, done)}"
    if shot.epoch is not None:
        of_pass = shot.epoch_done
        yield f"epoch {shot.epoch}" + (
            "" if of_pass is None else f" ({100 * of_pass:.0f} %{_left(shot.epoch_left_s, of_pass)})"
        )
    if shot.data_share > DATA_SHARE:
        yield f"waiting for data {100 * shot.data_share:.0f} %"
    there = shot.size if shot.elastic_status is None else shot.elastic_status.members
    if shot.effective is not None and shot.effective <= there:  # else some have left since it was measured
        yield f"{shot.effective:.{0 if shot.effective >= 10 else 1}f} effective workers of {there}"
    if shot.delay is not None:
        yield f"delay {delay_text(shot.delay)}"
    yield f"{shot.total:,} minibatches"
    if len(set(shot.minibatches.values())) > 1:
        yield f"{min(shot.minibatches.values()):,} to {max(shot.minibatches.values()):,} a worker"


def _left(seconds: float | None, done: float) -> str:
    return "" if seconds is None or done >= 1.0 else f", {seconds_text(seconds)} left"
