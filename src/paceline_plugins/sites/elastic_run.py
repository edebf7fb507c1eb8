# SPDX-License-Identifier: Apache-2.0
"""`paceline run --elastic`, `--join` and `--again`: from the options to the exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import err, near, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.signals import SignalListener
from paceline.cli.run import certificates, checks, dry_run, output, start
from paceline.cli.run.certificates import JOB
from paceline.cli.run.conclusion import clear
from paceline.cli.run.hosts import refuse_several_launchers
from paceline.cli.run.options import ElasticOptions, ProgramOptions, RunOptions, Security, StartOptions
from paceline.cli.run.program import Program, starter
from paceline.communication.sockets.identity import CONTROL, WORKER
from paceline.errors import MismatchError, PacelineError
from paceline.flow.lock import Lock
from paceline.observe.reports.elastic_events import ControlEvent, ElasticStatus
from paceline_plugins.sites import elastic_checks, elastic_messages, saved_plan, sites
from paceline_plugins.sites.elastic_launcher import Ending, Events, Launcher, control
from paceline_plugins.sites.saved_plan import SavedPlan
from paceline_plugins.sites.sites import HERE, Sites, how_to_join, invite
from paceline_plugins.sites.sites import options as sites_of

if TYPE_CHECKING:
    from paceline_plugins.sites.relay.member import RelayMember
    from paceline_plugins.sites.relay.server import RelayServer

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ElasticRun:
    """This host's part in an elastic run."""

    elastic: ElasticOptions  # the options about it
    start: StartOptions  # how the workers start
    workers: int  # of this host
    sites: Sites = HERE  # how hosts of other sites take part
    variables: Mapping[str, str] = field(default_factory=dict)  # further ones of the workers

    @property
    def leads(self) -> bool:
        """Whether this launcher hosts the control plane."""
        return self.elastic.elastic is not None

    def cluster(self) -> LaunchCluster:
        """Of this host's workers; a launcher that joins is not host 0."""
        return LaunchCluster(max(1, self.workers), 2, 0 if self.leads else 1, timeout_s=self.start.timeout)

    def address(self) -> tuple[str, int]:
        """The control plane's host and port (0: any), without a connection to it; refuses invalid options."""
        self._bounds()
        asked = self.elastic
        if asked.join is not None:
            return checks.host_and_port("--join", asked.join, 0)
        return (LOOPBACK, 0) if asked.listen is None else checks.host_and_port("--listen", asked.listen, 0)

    def place(self) -> tuple[tuple[int, int], tuple[str, int]]:
        """Bounds, and the control plane's address once it can be used; refuses invalid options."""
        bounds = self._bounds()
        if bounds is not None:
            return bounds, elastic_checks.listen(self.elastic.listen)
        assert self.elastic.join is not None
        return (0, 0), elastic_checks.join(self.elastic.join, self.start.timeout)

    def _bounds(self) -> tuple[int, int] | None:
        """Fewest and most workers; None where this launcher joins another's run."""
        asked = self.elastic
        if (asked.elastic is None) == (asked.join is None):
            refuse("--elastic hosts a run and --join takes part in one: give one of them")
        elastic_checks.seconds(self.start.timeout, asked.grace)
        elastic_checks.rule(self.start.rule)
        bounds = None if asked.elastic is None else elastic_checks.bounds(asked.elastic)
        for name, value in (("--listen", asked.listen), ("--grace", asked.grace)):
            if value is not None and bounds is None:
                refuse(f"{name} belongs to the launcher that is joined, beside its --elastic")
        elastic_checks.workers(self.workers, None if bounds is None else bounds[1])
        checks.check_crowd(self.workers, checks.CROWDED_ELASTIC)
        return bounds


def run(program: Program | None, options: RunOptions) -> int:
    """The exit code of a launcher that hosts an elastic run, or joins one."""
    checks.check_rule(options.start.rule, True, program)
    starter().refuse_elastic(program, options.program)
    if options.elastic.elastic is not None:
        refuse_several_launchers()
    workers = 1 if options.hosts.workers is None else options.hosts.workers
    places = sites_of(options.elastic, options.security, options.start.print_only, workers)
    asked = ElasticRun(options.elastic, options.start, workers, places, options.tracking.environment())
    if options.start.print_only:
        _print_plan(asked, program, options.security)
        return 0
    return start_run(asked, program, options.program, options.security)


def _print_plan(asked: ElasticRun, program: Program | None, security: Security) -> None:
    """`--print`: the workers of this host, and the command for other hosts."""
    host, port = asked.address()
    _check_secret(asked, security)
    directory = dry_run.log_directory(asked.start.log)
    cluster = asked.cluster()
    added = start.environment(cluster, asked.start.rule, directory) | dict(asked.variables)
    tls = security.tls or _from_environment()
    if tls is None and not security.in_the_clear:
        tls = directory / "certificates" / f"host-{cluster.host_index}" / "place-0"
    if tls is not None:
        added["PACELINE_TLS"] = str(tls.absolute())
    secret = "--open" if security.in_the_clear else f"--tls {security.tls}" if security.tls else "--job FILE"
    where = f"{host}:{port or dry_run.FREE}"
    print(f"{'the control plane would listen' if asked.leads else 'the control plane listens'} at {where}")
    print(f"logs: {near(directory)}")
    command = [] if program is None else program.command()
    for local in range(asked.workers):
        place = {"LOCAL_RANK": str(local), "PACELINE_CONTROL": where}
        dry_run.worker(f"worker {local} of this host", command, added | place)
    typed = "PROGRAM" if program is None else shlex.join(program.typed)
    if asked.leads:
        print(f"\non other hosts:\n  paceline run --join {where} {secret} --workers N {typed}")


def _check_secret(asked: ElasticRun, security: Security) -> None:
    if not asked.leads and not asked.sites.given and not security.given and _from_environment() is None:
        refuse(
            "--join needs the job's secret: --job FILE, a copy of certificates/job.pem in the log directory of the "
            "first launcher; if that one runs with --open, give --open here as well"
        )


def _from_environment() -> Path | None:
    """The folder of certificates that the environment names."""
    return Path(os.environ["PACELINE_TLS"]) if os.environ.get("PACELINE_TLS") else None


def _certificate(asked: ElasticRun, directory: Path, security: Security) -> Path | None:
    """The folder of this host's certificate; None with `--open`."""
    cluster = asked.cluster()
    if asked.sites.enrolled is not None:
        return asked.sites.enrolled.write(directory / "certificates" / f"host-{cluster.host_index}")
    if asked.sites.invites:
        return certificates_of(cluster, directory, None, True, False)
    if security.in_the_clear:
        if not asked.start.quiet:
            certificates.warn_open()
        return None
    listens = asked.elastic.listen is not None
    return (
        security.tls
        or _from_environment()
        or certificates_of(cluster, directory, security.job, listens, listens and not asked.start.quiet)
    )


def certificates_of(
    cluster: LaunchCluster, directory: Path, job: Path | None, joinable: bool, announces: bool
) -> Path | None:
    """Make the certificates of an elastic run's launcher and of its workers; returns their folder.

    The folder itself has the certificate of the control plane where this launcher hosts it, and `place-K` that of the
    worker in place K, which its successors there use as well. `join` has one for workers that other supervisors of
    this host start, with `--tls` or `PACELINE_TLS`.
    """
    host = certificates.issue(cluster, directory, job, joinable, announces)
    if host is None:
        return None
    if cluster.host_index == 0:
        host.issue("", CONTROL)
        host.issue("join", WORKER)
    for place in range(cluster.workers):
        host.issue(f"place-{place}", WORKER)
    return host.folder


def start_run(asked: ElasticRun, program: Program | None, options: ProgramOptions, security: Security) -> int:
    """Run the workers of this host to the end of the run, or until they leave; the exit code."""
    bounds, address = asked.place()
    _check_secret(asked, security)
    log, overwrite = asked.start.log, asked.start.overwrite
    if log is not None:
        elastic_checks.vacant(log, overwrite)
    cluster = LaunchCluster(max(1, asked.workers), timeout_s=asked.start.timeout)
    directory = checks.log_directory(log, cluster, overwrite)
    tls = _certificate(asked, directory, security)
    relay = asked.sites.relay(address)
    if asked.sites.invites:
        invite(directory, address, asked.sites.public)
        address = (LOOPBACK, 0)  # which the relay leads to
    plan = SavedPlan(
        command=program.command() if program is not None and asked.workers else [],
        environment=start.environment(cluster, asked.start.rule, directory) | dict(asked.variables),
        folder=os.getcwd(),
        workers=asked.workers,
        control=address,
        leads=asked.leads,
        bounds=bounds,
        timeout_s=asked.start.timeout,
        grace_s=asked.elastic.grace,
        tls=None if tls is None else str(tls.resolve()),
        unix_s=time.time(),
        relay=relay,
        invites=asked.sites.invites,
    )
    code = _run(plan, directory, None, asked.start.quiet)
    if code or program is None or not program.is_tool:  # a Python program was looked at before the start
        return code
    return int(starter().work_not_shared(directory, options, program, asked.workers, asked.start.rule))


def resume_run(directory: Path, quiet: bool) -> int:
    """Continue the run of a launcher that was killed; the exit code."""
    try:
        plan, places = saved_plan.read(directory)
    except PacelineError as error:
        refuse(f"--again: {error}")
    return _run(plan, directory, places, quiet)


def _run(plan: SavedPlan, directory: Path, places: list[dict[str, Any]] | None, quiet: bool) -> int:
    (directory / "output").mkdir(exist_ok=True)
    try:
        with (
            contextlib.closing(Lock(directory)),
            contextlib.closing(Events(directory / saved_plan.EVENTS, plan.unix_s)) as events,
            control(plan, directory, events) as (plan, server),
            at_relay(plan, directory, server),
            start.shown(directory, plan.workers, quiet) as show,
        ):
            tails = output.Tails(show)
            launcher = Launcher(plan, directory, events, server, tails)
            _begin(launcher, places, quiet)
            printer = _EventPrinter(events, launcher, show, quiet)
            with SignalListener() as listener:
                ending: Ending = launcher.follow(listener, printer.print_new)
    except PacelineError as error:
        refuse(str(error))
    code = elastic_messages.conclude(ending, plan.workers, directory, quiet, tails.messages)
    return code or clear(directory, 0)


def _begin(launcher: Launcher, places: list[dict[str, Any]] | None, quiet: bool) -> None:
    """Log the start, adopt the workers of an earlier launcher, and print how to join."""
    plan = launcher.plan
    facts = {
        "fewest": plan.bounds[0],
        "most": plan.bounds[1],
        "control": plan.address,
        "again": places is not None,
        "unix_s": plan.unix_s,
    }
    launcher.events.write("began", facts)
    if places is not None:
        running = launcher.take_over(places)
        if not quiet:
            err().print(f"resumed: {running} of {plan.workers} workers still run", markup=False)
    if plan.leads and not quiet:
        how = _how_to_join(plan) if plan.relay is None else how_to_join(plan, launcher.directory)
        err().print(how, markup=False, soft_wrap=True)


def _how_to_join(plan: SavedPlan) -> str:
    """The command that joins this run; on this host alone, this launcher's own certificate serves."""
    secret = plan.tls is not None and (Path(plan.tls).parent / "job.pem").exists()
    local = plan.control[0] in ("127.0.0.1", "::1", "localhost") and not secret
    own = Path(plan.tls or "") / "join"
    shared = str(own) if own.is_dir() else plan.tls or ""
    secure = " --open" if plan.tls is None else f" --tls {shlex.quote(shared)}" if local else " --job FILE"
    who = "launchers on this host join" if local else "other hosts join"
    join = f"paceline run --join {plan.address} --workers N{secure} PROGRAM"
    beyond = "; other hosts can join a run that was started with --listen" if local else ""
    return f"the control plane listens at {plan.address}; {who} with: {join}{beyond}"


class _EventPrinter:
    """Prints news of the run among the lines of the workers."""

    def __init__(self, events: Events, launcher: Launcher, show: output.Show, quiet: bool) -> None:
        self.events, self.launcher, self.show, self.quiet = events, launcher, show, quiet
        self.elastic_status = ElasticStatus()
        self._printed: set[str] = set()

    def print_new(self) -> None:
        """Print all new events; for the main thread, which has the terminal."""
        while not self.events.news.empty():
            kind, facts = self.events.news.get()
            line = elastic_messages.of_process(kind, facts, self.launcher.workers.over)
            if line:
                self.show(int(facts["place"]), line, True)
            self.elastic_status.add(ControlEvent(0.0, kind, facts))
            text = "" if self.quiet else elastic_messages.of_control(kind, facts, self.elastic_status)
            if kind in elastic_messages.ONCE and kind in self._printed:
                continue
            self._printed.add(kind)
            if text:
                err().print(text, markup=False, soft_wrap=True)


LOOK_EVERY_S = 1.0


@contextlib.contextmanager
def at_relay(plan: SavedPlan, directory: Path, server: Any) -> Iterator[None]:
    """Make the control plane reachable through the relay, if there is one and this launcher leads."""
    if plan.relay is None or server is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        if plan.invites:
            stack.enter_context(_relay(plan, directory))
        member = _enter(plan, server)
        stack.callback(member.close)
        yield


def _relay(plan: SavedPlan, directory: Path) -> RelayServer:
    from paceline.communication.sockets.tls import TLS
    from paceline_plugins.sites.relay.enrolment import Registrar
    from paceline_plugins.sites.relay.invitation import Invitation
    from paceline_plugins.sites.relay.server import RelayServer

    assert plan.relay is not None and plan.tls is not None
    door = directory / "certificates"
    known = []
    with contextlib.suppress(OSError, PacelineError):
        known.append(Invitation.read((door / sites.INVITATION).read_text(encoding="ascii"), over=True))
    run = {"rule": plan.environment.get("PACELINE_RULE"), "timeout_s": plan.timeout_s}
    registrar = Registrar(sites.authority(door / JOB), known, run)
    return RelayServer(*plan.relay, TLS.folder(plan.tls), registrar)


def _enter(plan: SavedPlan, server: Any) -> RelayMember:
    """The control plane's place; an earlier launcher's is free once the relay has noticed that it is gone."""
    from paceline.communication.sockets.tls import TLS
    from paceline_plugins.sites.relay.member import RelayMember
    from paceline_plugins.sites.relay.protocol import BUSY, CONTROL_NAME, SILENCE_S

    assert plan.relay is not None and plan.tls is not None
    until = time.monotonic() + 1.5 * SILENCE_S
    while True:
        try:
            return RelayMember(plan.relay, CONTROL_NAME, TLS.folder(plan.tls), server.adopt, plan.timeout_s)
        except MismatchError as error:
            if BUSY not in str(error) or time.monotonic() > until:
                raise
            time.sleep(LOOK_EVERY_S)
