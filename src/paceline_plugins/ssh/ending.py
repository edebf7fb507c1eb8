# SPDX-License-Identifier: Apache-2.0
"""The final messages of a run on named hosts, and its exit code: as on one machine, with the host's name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.text import Text

from paceline.cli.console import err, error_panel
from paceline.cli.run import conclusion
from paceline.observe.reports.summary import seconds_text
from paceline_plugins.ssh import words
from paceline_plugins.ssh.follow import Ended, worker_files
from paceline_plugins.ssh.hosts import Host

_OF_WORKER = re.compile(r"\[\d+\] ")


def conclude(
    hosts: Sequence[Host],
    ended: Ended,
    stopped_by: int | None,
    directory: Path,
    seconds: float,
    quiet: bool,
    elastic: Sequence[str] = (),
) -> int:
    """Print how the run ended; the exit code.

    Args:
        hosts: in the order of their ranks.
        ended: how their launchers ended.
        stopped_by: the signal that the user sent, if any.
        directory: of the logs, here.
        seconds: that the run took.
        quiet: print errors alone.
        elastic: the options of an elastic run, whose first launcher has said how it ended; empty in other runs.
    """
    if elastic and 0 in ended.codes:
        code = ended.codes[0] if stopped_by is None else conclusion.stopped(stopped_by)
    else:
        code = _verdict(hosts, ended, stopped_by, directory / "output", seconds, quiet)
    if not quiet:
        conclusion.point_at_logs(directory)
    return code


def _verdict(
    hosts: Sequence[Host], ended: Ended, stopped_by: int | None, output: Path, seconds: float, quiet: bool
) -> int:
    files = {rank: path for rank, (_, path) in worker_files(output).items()}
    said = {index: read(output / f"{words.said_by(index)}.json") for index in range(len(hosts))}
    names = [host.name for host in words.by_rank(hosts)]
    if stopped_by is not None and not ended.lost:
        return conclusion.stopped(stopped_by)
    if ended.lost:
        return _lost(hosts, ended)
    codes = {rank: code for one in said.values() for rank, code in one.codes.items() if rank in files}
    if codes:
        return conclusion.report_failure(codes, files, names)
    if ended.first is not None:
        return _refused(hosts, ended, output)
    lost = {rank: code for one in said.values() for rank, code in one.lost.items() if rank in files}
    if lost:
        return conclusion.finished_without(lost, files, seconds, names)
    if not quiet:
        err().print(f"{len(names)} worker{'s' if len(names) > 1 else ''} finished after {seconds_text(seconds)}")
    return 0


def _lost(hosts: Sequence[Host], ended: Ended) -> int:
    """Report the hosts whose connection was lost, the first one first."""
    lines = [f"{hosts[index].name}: {why}" for index, why in ended.lost.items()]
    names = ", ".join(hosts[index].name for index in ended.lost)
    left = [hosts[index].name for index in ended.codes]
    hint = f"the workers of {', '.join(left)} were stopped" if left else "no host is left"
    parts = (Text("\n".join(lines), style="bold red"), Text(f"{hint}; those of {names} end by themselves"))
    err().print(error_panel(f"{names} {'was' if len(ended.lost) == 1 else 'were'} lost", *parts))
    return 1


def _refused(hosts: Sequence[Host], ended: Ended, output: Path) -> int:
    """Report a launcher that started no worker, or that was not content with how the run went, in its own words."""
    assert ended.first is not None
    host, file = hosts[ended.first], output / f"{words.said_by(ended.first)}.launcher"
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    own = [line for line in lines if line.strip() and not _OF_WORKER.match(line)]
    err().print(f"{host.name} ended with exit code {ended.codes[ended.first]}; its launcher says:", markup=False)
    for line in own or ["(nothing)"]:
        err().print(line, markup=False, soft_wrap=True)
    return ended.codes[ended.first]


@dataclass(frozen=True)
class LauncherEnding:
    """Exit codes by rank, -n for signal n.

    Attributes:
        codes: of the workers that failed.
        lost: of those that failed where the other ones continued.
    """

    codes: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[int, int] = field(default_factory=dict)


def read(path: Path) -> LauncherEnding:
    """What a launcher wrote; empty where it wrote nothing."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        codes, lost = ({int(rank): int(code) for rank, code in said[name].items()} for name in ("codes", "lost"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return LauncherEnding()
    return LauncherEnding(codes, lost)
