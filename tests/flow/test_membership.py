# SPDX-License-Identifier: Apache-2.0
"""The connection among members that change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.communication import SoloTransport
from paceline.errors import GivenUpError, PacelineError
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Terms
from paceline.flow.membership import CommitReport, MembersTransport, join
from paceline.update.engine.settings import Settings
from tests.communication.ring.rings import everywhere, ring
from tests.flow.control.cluster import HERE, SOON, begin, control, together, wait_for


def test_the_connection_of_former_members_is_closed() -> None:
    """Its sockets and threads end, and what it has sent still counts."""
    with ring(2) as members:
        changing = MembersTransport()
        changing.renew(members[0])
        everywhere(members, lambda transport: transport.all_reduce(torch.ones(4)).wait())
        changing.renew(SoloTransport())
        assert changing.bytes_sent == 16
        assert members[0]._connections._over.is_set()


def test_the_launcher_sees_who_waits_to_be_needed_and_who_has_exchanged(tmp_path: Path) -> None:
    """Its file is there while it waits; it goes as the worker joins, and is there again with its first commit."""
    proof, rule = tmp_path / "exchanged", {"rule": "block"}
    with control(Terms(timeout_s=SOON, expected=1)) as (server, log):
        first = ControlClient(HERE, server.port, About("host", HERE, 1, rule, first=1), None, SOON)
        begin(first)
        settings = Settings(control=f"{HERE}:{server.port}", exchanged=str(proof), timeout_s=SOON)
        second = join(rule, settings, 1)
        log.wait("held", workers=1, wanted=1)
        wait_for(proof.exists)
        first.close()
        second.enter()
        assert second.rank == 0 and not proof.exists()
        second.control.holds_state(second.generation.number)
        assert second.commit(CommitReport([], [], {}, 1)) is not None
        assert proof.exists()
        second.close()


def test_an_exchange_ends_when_the_control_plane_dismisses_its_workers() -> None:
    """It would wait for a worker that has ended, up to the deadline."""
    with control(Terms(timeout_s=SOON, start_s=SOON, expected=2)) as (server, _):
        settings = Settings(control=f"{HERE}:{server.port}", timeout_s=SOON)
        first, second = (join({"rule": "block"}, settings) for _ in range(2))
        together(first.enter, second.enter)
        exchange = first.transport.all_reduce(torch.ones(4))
        with server._turn() as now:
            server._machine.give_up("it is over", now)
        with pytest.raises(PacelineError, match="it is over"):
            exchange.wait()
        with pytest.raises(GivenUpError, match="it is over"):  # the other may have said so first, over the ring
            first.control.failed(first.generation.number, "the exchange failed", [])
        first.close()
        second.close()
