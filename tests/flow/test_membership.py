# SPDX-License-Identifier: Apache-2.0
"""The connection among members that change."""

from __future__ import annotations

import torch

from paceline.communication import SoloTransport
from paceline.flow.membership import MembersTransport
from tests.communication.ring.rings import everywhere, ring


def test_the_connection_of_former_members_is_closed() -> None:
    """Its sockets and threads end, and what it has sent still counts."""
    with ring(2) as members:
        changing = MembersTransport()
        changing.renew(members[0])
        everywhere(members, lambda transport: transport.all_reduce(torch.ones(4)).wait())
        changing.renew(SoloTransport())
        assert changing.bytes_sent == 16
        assert members[0]._connections._over.is_set()
