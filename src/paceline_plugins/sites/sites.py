# SPDX-License-Identifier: Apache-2.0
"""Elastic runs over several sites: invitations, and the certificates that a host gets for one."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import err, near, refuse
from paceline.cli.launch.cluster import address_text
from paceline.cli.run import checks
from paceline.cli.run.certificates import JOB
from paceline.cli.run.options import ElasticOptions, Security
from paceline.errors import PacelineError, PeerLostError
from paceline_plugins.sites.saved_plan import SavedPlan

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from paceline_plugins.sites.relay.invitation import Invitation

INVITATION = "invitation"
"""File of the line in `certificates/`, which only the owner can read."""
FIND_S = 60.0
LOOK_EVERY_S = 0.5
SAY_AFTER_S = 2.0


@dataclass(frozen=True)
class Enrolled:
    """What a host got for an invitation."""

    keys: list[EllipticCurvePrivateKey]  # private keys, the launcher's first, then one for each worker's place
    certificates: list[bytes]  # of these keys, as PEM
    authority: bytes  # certificate of the job's authority, as PEM
    where: tuple[str, int]  # the relay listens
    run: dict[str, Any]  # its options that all hosts share, as far as the relay knows them

    def write(self, folder: Path) -> Path:
        """Write the launcher's certificate to `folder`, and that of place K to `folder/place-K`."""
        from paceline.communication.sockets.certificates import write_folder

        folder.parent.mkdir(mode=0o700, exist_ok=True)
        for number, (key, certificate) in enumerate(zip(self.keys, self.certificates, strict=True)):
            write_folder(folder if number == 0 else folder / f"place-{number - 1}", key, certificate, self.authority)
        return folder


@dataclass(frozen=True)
class Sites:
    """How hosts of other sites take part."""

    invites: bool = False  # this launcher hosts the relay, at `--listen`
    public: str | None = None  # where others reach it; None: at the same address
    enrolled: Enrolled | None = None  # what this host got for an invitation; None without one

    @property
    def given(self) -> bool:
        """Whether there is a relay."""
        return self.invites or self.enrolled is not None

    def relay(self, listen: tuple[str, int]) -> tuple[str, int] | None:
        """Where this host reaches the relay, given the address of `--listen`."""
        if self.enrolled is not None:
            return self.enrolled.where
        return listen if self.invites else None


HERE = Sites()
"""All hosts reach each other."""


def options(asked: ElasticOptions, security: Security, print_only: bool, workers: int) -> Sites:
    """Of a launcher that leads; refuses options that exclude each other."""
    invite, public, relay, listen = asked.invite, asked.public, asked.relay, asked.listen
    if public is not None:
        if not invite:
            refuse("--public says where other sites reach the relay of --invite: give --invite as well")
        checks.host_and_port("--public", public)
    if not invite and relay is None:
        return HERE
    if invite and relay is not None:
        refuse("--relay is a relay elsewhere, and with --invite this launcher is one: give one of them")
    if invite and (listen is None or checks.host_and_port("--listen", listen, 0)[1] == 0):
        refuse(
            "--invite needs --listen HOST:PORT, an address of this host that the other sites reach; if they reach "
            "none, start `paceline relay` on a host that all of them reach, and give --relay FILE here"
        )
    if relay is not None and listen is not None:
        refuse("--listen is for hosts that the others reach, and with --relay they come through the relay")
    if security.given:
        refuse(f"an invitation is for certificates of the run's own: leave {security.given[0]} out")
    if print_only:
        refuse("--print starts nothing, and an invitation is made when the run starts: leave one of them out")
    if relay is None:
        return Sites(True, public)
    return Sites(enrolled=enrol(read(relay, "--relay", lead=True), "--relay", workers))


def read(text: str, option: str, lead: bool) -> Invitation:
    """The invitation in a file of that name, or on standard input for `-`; refuses one that is not good here.

    Settings and variables may hold the line itself.
    """
    from paceline_plugins.sites.relay.invitation import LEAD, PREFIX, Invitation

    if text.startswith(PREFIX) and any(text in word for word in sys.argv):
        refuse(
            f"{option}: every user of this host can read a command line, and an invitation is a secret: give - and "
            "paste the line when it is asked for, or give a file that holds it"
        )
    if text == "-":
        text = getpass.getpass("invitation: ") if sys.stdin.isatty() else sys.stdin.readline(4000)
    elif not text.startswith(PREFIX) and os.path.isfile(text):
        try:
            text = Path(text).read_text(encoding="ascii", errors="replace")[:4000]
        except OSError as error:
            refuse(f"{option}: {error}")
    try:
        found = Invitation.read(text)
    except PacelineError as error:
        refuse(f"{option}: {error}")
    if (found.purpose == LEAD) != lead:
        line = "launcher's" if lead else "joining hosts'"
        refuse(f"{option}: give the {line} line of `paceline relay` here; this is the other one")
    return found


def enrol(invitation: Invitation, option: str, workers: int) -> Enrolled:
    """Get certificates for a launcher and its workers; waits for the relay."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from paceline_plugins.sites.relay.enrolment import MOST_KEYS
    from paceline_plugins.sites.relay.enrolment import enrol as ask

    if not 0 <= workers < MOST_KEYS:
        refuse(f"--workers must lie in 0..{MOST_KEYS - 1} with an invitation, got {workers}")
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(1 + workers)]
    public = [key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for key in keys]
    began, said = time.monotonic(), False
    while True:
        try:
            answer = ask(invitation, public, socket.gethostname())
            return Enrolled(keys, answer.certificates, answer.authority, (invitation.host, invitation.port), answer.run)
        except PeerLostError as error:
            waited = time.monotonic() - began
            if waited > FIND_S:
                refuse(f"{option}: {error}")
            if waited > SAY_AFTER_S and not said:
                said = True
                _say(f"{error}: waiting for it, {FIND_S:g} s at most")
            time.sleep(LOOK_EVERY_S)
        except PacelineError as error:
            refuse(f"{option}: {error}")


def invite(directory: Path, where: tuple[str, int], public: str | None) -> None:
    """Make the invitation of a run whose authority is in its log directory; see `line`."""
    from paceline_plugins.sites.relay.invitation import Invitation

    host, port = where if public is None else checks.host_and_port("--public", public)
    door = directory / "certificates"
    try:
        write_line(door / INVITATION, Invitation(host, port, authority(door / JOB).fingerprint()))
    except (PacelineError, OSError) as error:
        refuse(f"the invitation cannot be made: {error}")


def authority(job: Path) -> Any:
    """The job's authority."""
    from paceline.communication.sockets.certificates import Authority

    return Authority.load(job)


def write_line(path: Path, invitation: Invitation) -> None:
    """Write the line to a file that only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{invitation.text()}\n")


def how_to_join(plan: SavedPlan, directory: Path) -> str:
    """How other hosts join a run with a relay."""
    assert plan.relay is not None
    if not plan.invites:
        return (
            f"members meet at the relay at {address_text(*plan.relay)}; other hosts join with the joining hosts' line "
            "that `paceline relay` printed there: paceline join - PROGRAM"
        )
    from paceline_plugins.sites.relay.invitation import Invitation

    path = directory / "certificates" / INVITATION
    try:
        line = path.read_text(encoding="ascii").strip()
        until = Invitation.read(line).until
    except (OSError, PacelineError) as error:
        return f"no more hosts can be invited: {error}"
    return (
        f"other hosts join, wherever they are, with paceline join - PROGRAM, which asks for this line (also in "
        f"{near(path)}; keep it secret: whoever has it can join until {until}):\n{line}"
    )


def _say(what: str) -> None:
    err().print(what, markup=False, soft_wrap=True)
