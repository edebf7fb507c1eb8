# SPDX-License-Identifier: Apache-2.0
"""`paceline relay`: a place where the hosts of an elastic run meet, if none of them can be reached from outside."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import command_app, err, near, out, refuse
from paceline.cli.launch.cluster import address_text
from paceline.cli.launch.signals import SignalListener
from paceline.cli.run import checks
from paceline.cli.run.certificates import JOB
from paceline.errors import PacelineError
from paceline.flow.lock import Lock
from paceline_plugins.sites import elastic_checks, sites

if TYPE_CHECKING:
    from paceline.communication.sockets.certificates import Authority
    from paceline_plugins.sites.relay.invitation import Invitation
    from paceline_plugins.sites.relay.server import RelayServer

LOOK_EVERY_S = 0.1


def command(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="An address of this host that all hosts of the run reach.")
    ],
    public: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where they reach it, if a router forwards it to --listen.")
    ] = None,
) -> None:
    """Pass on what the hosts of an elastic run say to each other, until a signal ends it.

    For runs whose hosts are all behind routers: only this host needs an open port. It trains nothing, and cannot read
    what it passes on. It serves one run at a time. Its keys are in ./paceline-relay: the next start there prints the
    same lines.
    """
    folder = Path("paceline-relay")
    where = elastic_checks.listen(listen)
    if where[1] == 0:
        refuse(f"--listen must name a port, got {listen}: the lines that are printed have it")
    shown = where if public is None else checks.host_and_port("--public", public)
    try:
        with contextlib.closing(_lock(folder)), _relay(folder, where, shown), SignalListener() as listener:
            while not listener.received:
                threading.Event().wait(LOOK_EVERY_S)
    except (PacelineError, OSError) as error:
        refuse(str(error))


def _lock(folder: Path) -> Lock:
    with checks.refuse_unwritable(folder, "the folder of the keys"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Lock(folder, "relay.lock")


def _relay(folder: Path, where: tuple[str, int], shown: tuple[str, int]) -> RelayServer:
    """The relay, with the keys of an earlier start; prints how to use it."""
    from paceline.communication.sockets.certificates import Authority
    from paceline.communication.sockets.identity import HOST
    from paceline_plugins.sites.relay.enrolment import Registrar
    from paceline_plugins.sites.relay.invitation import JOIN, LEAD
    from paceline_plugins.sites.relay.server import RelayServer

    job = folder / JOB
    if not job.exists():
        Authority.new().export(job)
    authority = Authority.load(job)
    tls = authority.issue(folder / "relay", "relay", HOST)
    lead = _line(folder / "lead", authority, shown, LEAD)
    join = _line(folder / "join", authority, shown, JOIN)
    server = RelayServer(*where, tls, Registrar(authority, [lead, join]))
    err().print(
        f"the relay listens at {address_text(*where)}; keep these lines secret: whoever has one can take "
        f"part until {join.until} (they are also in {near(folder)}). Where the run starts, paceline run --elastic 1:64 "
        "--relay - PROGRAM asks for the first one; elsewhere paceline join - PROGRAM asks for the second one",
        markup=False,
        soft_wrap=True,
    )
    out().print(lead.text(), soft_wrap=True)
    out().print(join.text(), soft_wrap=True)
    return server


def _line(path: Path, authority: Authority, shown: tuple[str, int], purpose: int) -> Invitation:
    """The invitation of an earlier start, or a new one if there is none, it has ended, or the address is another."""
    from paceline_plugins.sites.relay.invitation import Invitation

    with contextlib.suppress(OSError, PacelineError):
        found = Invitation.read(path.read_text(encoding="ascii"))
        if (found.host, found.port, found.fingerprint) == (*shown, authority.fingerprint()):
            return found
    made = Invitation(*shown, authority.fingerprint(), purpose=purpose)
    sites.write_line(path, made)
    return made


app = command_app(command)
