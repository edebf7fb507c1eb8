# SPDX-License-Identifier: Apache-2.0
"""The launcher's part in an elastic run over several sites: its control plane is a member of the relay, and the relay
itself may be in the launcher."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.run.certificates import JOB
from paceline.errors import MismatchError, PacelineError
from paceline_plugins.sites import sites
from paceline_plugins.sites.saved_plan import SavedPlan

if TYPE_CHECKING:
    from paceline_plugins.sites.relay.member import RelayMember
    from paceline_plugins.sites.relay.server import RelayServer

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
    door = directory / "door"
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
