# SPDX-License-Identifier: Apache-2.0
"""`paceline run --hosts a,b,c`: check the hosts, bring the program, start a launcher on each, and be one run here.

The files that the launchers write come back while they are written, into one log directory. So the workers' output is
shown as on one machine, and `paceline watch` and `report` read the directory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from paceline.cli.console import USAGE, err, error_panel
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.saved_plan import address_text
from paceline.cli.launch.signals import SignalListener
from paceline.cli.run import checks, elastic_checks, start
from paceline.cli.run.conclusion import stopped
from paceline.cli.run.options import StartOptions
from paceline_plugins.ssh import check, words
from paceline_plugins.ssh.ending import conclude
from paceline_plugins.ssh.follow import follow
from paceline_plugins.ssh.hosts import Host
from paceline_plugins.ssh.link import Links, Stopped
from paceline_plugins.ssh.program_files import ProgramFiles

BRING_S = 300.0
START_S = 60.0


@dataclass(frozen=True)
class Job:
    """The run of all hosts.

    Attributes:
        hosts: in the order of their ranks, each with its number of workers.
        program: with the files that the hosts need.
        options: those of the launcher of each host that are the same on all.
        elastic: the options of an elastic run for its first host; empty for other runs.
        start: how the workers start.
        master: where the hosts shall meet, or None.
        rank_0_only: whether only rank 0's output is shown.
        needs_secret: whether the workers get certificates of the job.
    """

    hosts: Sequence[Host]
    program: ProgramFiles
    options: Sequence[str]
    elastic: Sequence[str]
    start: StartOptions
    master: tuple[str, int] | None
    rank_0_only: bool
    needs_secret: bool

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
        elastic_checks.vacant(log, overwrite)
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
        what = f"bringing {count} of {job.program.base} there" if plan.bring else "as brought before"
        job.say(f"{job.hosts[index].name}: {what}; the program runs in {plan.directory}")
    if asked and job.program.left_out:
        large = ", ".join(f"{name} ({size >> 20} MiB)" for name, size in list(job.program.left_out.items())[:3])
        job.say(f"large files are not brought: {large}; copy them yourself where the program needs them")
    for index, said in links.ask("bring", asked, BRING_S).items():
        changed = [path for path in said.get("differ", []) if path in job.program.code]  # other files may still grow
        wrong = said.get("error") or ", ".join(changed[:3])
        if wrong:
            links.trouble(index, f"the program could not be brought: {wrong}")
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
