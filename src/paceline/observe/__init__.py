# SPDX-License-Identifier: Apache-2.0
"""What a run records, and how it is read.

::

    event_log         what happened, one JSON object a line, one file a worker; whether that worker still runs
    event_file        appends whole lines, also when the disk is full
    http_server       pages over HTTP, whatever the clients do
    standard_streams  a worker's output goes on when its disk is full
    printable         text of others, made harmless for a terminal
    sinks/            where metrics go while a run trains
    reports/          reads logs, and follows them live
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.observe.reports.log import RunLog, WorkerLog
    from paceline.observe.reports.read import LogError, read_run, read_runs
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "LogError": "reports.read",
            "RunLog": "reports.log",
            "WorkerLog": "reports.log",
            "read_run": "reports.read",
            "read_runs": "reports.read",
        },
    )

__all__ = [
    "LogError",
    "RunLog",
    "WorkerLog",
    "read_run",
    "read_runs",
]
