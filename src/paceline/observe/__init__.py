# SPDX-License-Identifier: Apache-2.0
"""Looking at a run: read its event logs, follow it live, draw its figures, write its report.

::

    events    what stands on the lines of a log
    log       RunLog and WorkerLog: what the files say
    read      log files -> RunLog
    curves    RunLog -> points to draw (loss by samples, loss by time, bytes, delays)
    summary   RunLog -> the numbers of a run on one line, and what to worry about
    tables    those numbers and those of workers and sources, in rows
    canvas    the look of every picture
    figures   points -> pictures (needs the extra `paceline[report]`)
    page      numbers and pictures -> one HTML page
    clocks    the clocks of several hosts as one, by what exchanges tell
    spans     WorkerLog -> events of a timeline
    trace     directory -> one timeline of all workers, for Perfetto
    report    directories -> report.html and the pictures beside it
    live      log files that still grow -> numbers for a progress line

Nothing here is imported by the code that trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.observe.log import RunLog, WorkerLog
    from paceline.observe.read import LogError, read_run, read_runs
    from paceline.observe.report import ExtraTable, write_report
    from paceline.observe.trace import Trace, write_trace
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ExtraTable": "report",
            "LogError": "read",
            "RunLog": "log",
            "Trace": "trace",
            "WorkerLog": "log",
            "read_run": "read",
            "read_runs": "read",
            "write_report": "report",
            "write_trace": "trace",
        },
    )

__all__ = [
    "ExtraTable",
    "LogError",
    "RunLog",
    "Trace",
    "WorkerLog",
    "read_run",
    "read_runs",
    "write_report",
    "write_trace",
]
