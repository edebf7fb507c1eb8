# SPDX-License-Identifier: Apache-2.0
"""The newest run in a directory as a `RunLog`, while its workers still write: each time only new lines are read."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.reports.elastic_events import read_events
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.observe.reports.notices import JsonLinesTail
from paceline.observe.reports.read import LOG_NAME, Folding, add_event, align_logs

MOST_LINES, MOST_REPORTS = 500, 1_000
"""Of a worker: more than a chart shows, and little enough to sum up every other second."""


class RunFollower:
    """Follows the logs of a run.

    Args:
        directory: of the logs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events = 0  # lines read so far; unchanged where nothing was appended
        self._number = 0
        self._logs: dict[int, _GrowingLog] = {}

    def poll(self) -> RunLog | None:
        """Read new lines; None before the first worker has attached."""
        self._look_for_files()
        self.events += sum(log.read() for log in self._logs.values())
        workers = [self._logs[rank].log for rank in sorted(self._logs) if self._logs[rank].log.attach]
        if not workers:
            return None
        run = RunLog(self.directory, self._number, workers, self.directory.resolve().name)
        run.events = read_events(self.directory)
        align_logs(run)
        return run

    def _look_for_files(self) -> None:
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = LOG_NAME.fullmatch(path.name)
            if not match or not path.is_file():
                continue
            rank, number = int(match[1]), int(match[2] or 1)
            if number > self._number:
                self._number, self._logs = number, {}
            if number == self._number and rank not in self._logs:
                self._logs[rank] = _GrowingLog(path, rank)


class _GrowingLog:
    """One worker's file."""

    def __init__(self, path: Path, rank: int) -> None:
        self.log = WorkerLog(path=path, rank=rank)
        self._folding = Folding(self.log, MOST_LINES, MOST_REPORTS)
        self._tail = JsonLinesTail(path)

    def read(self) -> int:
        """Add new lines, and say how many there were."""
        count = 0
        for event in self._tail.read():
            count += 1
            try:
                add_event(self.log, event)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # the report counts them
            self._folding.after_event()
        return count
