# SPDX-License-Identifier: Apache-2.0
"""`paceline run --hosts a,b,c`: check the hosts, bring the program, start a launcher on each, and be one run here.

The files that the launchers write come back while they are written, into one log directory. So the workers' output is
shown as on one machine, and `paceline watch` and `report` read the directory.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from paceline.cli.console import USAGE, err, error_panel
from paceline.cli.launch.cluster import LaunchCluster, address_text
from paceline.cli.launch.signals import SignalListener
from paceline.cli.run import checks, conclusion, start
from paceline.cli.run.conclusion import stopped
from paceline.cli.run.options import StartOptions
from paceline.extensions import LAUNCHERS, extension
from paceline_plugins.ssh import check, words
from paceline_plugins.ssh.follow import Ended, follow, worker_files
from paceline_plugins.ssh.hosts import Host
from paceline_plugins.ssh.link import Links, Stopped
from paceline_plugins.ssh.program_files import ProgramFiles

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
    said = {index: read_ending(output / f"{words.said_by(index)}.json") for index in range(len(hosts))}
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
    return conclusion.finished(output.parent, quiet, len(names), ended.messages)


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


BRING_S = 300.0
START_S = 60.0


@dataclass(frozen=True)
class Job:
    """The run of all hosts."""

    hosts: Sequence[Host]  # in the order of their ranks, each with its number of workers
    program: ProgramFiles  # with the files that the hosts need
    options: Sequence[str]  # those of the launcher of each host that are the same on all
    elastic: Sequence[str]  # the options of an elastic run for its first host; empty for other runs
    start: StartOptions  # how the workers start
    master: tuple[str, int] | None  # where the hosts shall meet, or None
    rank_0_only: bool  # whether only rank 0's output is shown
    needs_secret: bool  # whether the workers get certificates of the job

    @property
    def size(self) -> int:
        """Workers of all hosts."""
        return sum(host.workers or 1 for host in self.hosts)

    def say(self, text: str) -> None:
        """Print a note."""
        if not self.start.quiet:
            err().print(text, markup=False, soft_wrap=True)


def run(job: Job) -> int:
    """Run the job to its end; the exit code."""
    with SignalListener() as listener:
        links = Links(job.hosts, listener)
        try:
            return _run(job, links)
        except Stopped:
            return stopped(listener.received[0])
        finally:
            links.close()


def _run(job: Job, links: Links) -> int:
    log, overwrite, quiet = job.start.log, job.start.overwrite, job.start.quiet
    began = time.monotonic()
    names = ", ".join(host.name for host in job.hosts)
    hosts = f"{len(job.hosts)} host{'s' if len(job.hosts) > 1 else ''}: {names}"
    job.say(f"checking {hosts}")
    links.open()
    checks.check_rule(job.start.rule, bool(job.elastic))  # loads torch, while ssh connects
    hello = check.greetings(links)
    plans = check.programs(links, hello, job.program)
    refuse_troubles(links)
    master = check.meeting(links, hello, job.master) if len(job.hosts) > 1 else None
    refuse_troubles(links)
    _bring(job, links, plans)
    cluster = LaunchCluster(job.size, timeout_s=job.start.timeout)
    if job.elastic and log is not None:
        extension(LAUNCHERS, "elastic").elastic_checks.vacant(log, overwrite)
    directory = checks.log_directory(log, cluster, overwrite)
    forget_output(directory / "output")
    job.say(f"starting {job.size} worker{'s' if job.size > 1 else ''} on {hosts}")
    _start(job, links, plans, directory, master)
    with start.shown(directory, job.size, quiet, job.rank_0_only, words.label(job.hosts)) as show:
        ended = follow(links, directory, show, bool(job.elastic))
    stopped_by = links.listener.received[0] if links.listener.received else None
    return conclude(job.hosts, ended, stopped_by, directory, time.monotonic() - began, quiet, job.elastic)


def forget_output(folder: Path) -> None:
    """Remove what an earlier run's workers and launchers wrote, which would be shown as this one's."""
    for pattern in ("rank-*.out", "rank-*.err", "place-*", "host-*.json", "host-*.launcher"):
        for path in folder.glob(pattern):
            path.unlink()


def refuse_troubles(links: Links) -> None:
    """Print all troubles of all hosts, and exit, if there are any."""
    if not links.troubles:
        return
    lines = [f"{links.hosts[index].name}: {text}" for index, found in sorted(links.troubles.items()) for text in found]
    title = f"{len(links.troubles)} of {len(links.hosts)} hosts cannot take part; nothing was started"
    err().print(error_panel(title, Text("\n".join(lines), style="default")))
    raise typer.Exit(USAGE)


def _bring(job: Job, links: Links, plans: Mapping[int, check.Plan]) -> None:
    """Copy what is missing or differs, and say so."""
    asked: dict[int, dict[str, Any]] = {}
    archives: dict[tuple[str, ...], bytes] = {}
    for index, plan in plans.items():
        if plan.bring is None:
            continue
        data = archives.setdefault(tuple(plan.bring), b"") or job.program.archive(plan.bring)
        archives[tuple(plan.bring)] = data
        asked[index] = {"copy": job.program.copy, "files": job.program.sums, "data": data}
        count = f"{len(plan.bring)} file{'s' if len(plan.bring) != 1 else ''} ({len(data) / 1024:.0f} KiB)"
        what = f"copying {count} of {job.program.base} there" if plan.bring else "as copied before"
        job.say(f"{job.hosts[index].name}: {what}; the program runs in {plan.directory}")
    if asked and job.program.left_out:
        large = ", ".join(f"{name} ({size >> 20} MiB)" for name, size in list(job.program.left_out.items())[:3])
        job.say(f"large files are not copied: {large}; copy them yourself where the program needs them")
    for index, said in links.ask("bring", asked, BRING_S).items():
        changed = [path for path in said.get("differ", []) if path in job.program.code]  # other files may still grow
        wrong = said.get("error") or ", ".join(changed[:3])
        if wrong:
            links.trouble(index, f"the program could not be copied: {wrong}")
    refuse_troubles(links)


def _start(
    job: Job, links: Links, plans: Mapping[int, check.Plan], directory: Path, master: tuple[str, int] | None
) -> None:
    """Start the launcher of each host; the job's secret goes through ssh's own channel."""
    name, secret = secrets.token_hex(8), ""
    if job.needs_secret:
        from paceline.communication.sockets.certificates import Authority

        secret = Authority.new().text()
    asked, meet = {}, None if master is None else address_text(*master)
    for index, host in enumerate(job.hosts):
        asked[index] = {
            "job": f"{name}/host-{index}",
            "directory": plans[index].directory,
            "environment": dict(host.environment),
            "secret": secret,
            "logs": str(directory) if links.links[index].is_here else "",
            "said": words.said_by(index),
            "options": words.of_host(job.hosts, index, job.options, meet, job.elastic),
            "program": list(job.program.words),
        }
    for index, said in links.ask("start", asked, START_S).items():
        if "error" in said:
            links.trouble(index, f"the launcher could not be started: {said['error']}")
    refuse_troubles(links)


@dataclass(frozen=True)
class LauncherEnding:
    """Exit codes by rank, -n for signal n."""

    codes: Mapping[int, int] = field(default_factory=dict)  # of the workers that failed
    lost: Mapping[int, int] = field(default_factory=dict)  # of those that failed where the other ones continued


def read_ending(path: Path) -> LauncherEnding:
    """What a launcher wrote; empty where it wrote nothing."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        codes, lost = ({int(rank): int(code) for rank, code in said[name].items()} for name in ("codes", "lost"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return LauncherEnding()
    return LauncherEnding(codes, lost)
