# SPDX-License-Identifier: Apache-2.0
"""What a worker does now, in a word, as `paceline watch` shows it."""

from __future__ import annotations

from paceline.observe.reports.live import Follower, LiveSnapshot

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
