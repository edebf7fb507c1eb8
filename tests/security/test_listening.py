# SPDX-License-Identifier: Apache-2.0
"""At which addresses a run listens: on one host nowhere but where that host alone can come."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import certificates
from paceline.communication.torch.store import listen
from tests.security.sockets import listening, loopback

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux tells who listens where")


def test_what_counts_as_listening_is_what_the_kernel_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("0.0.0.0", 0)) as far:
        found = listening({os.getpid()})
        assert {("127.0.0.1", near.getsockname()[1]), ("0.0.0.0", far.getsockname()[1])} <= found
        assert loopback("127.0.0.1") and loopback("::1") and loopback("::ffff:127.0.0.1") and not loopback("0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_listens_where_the_master_is(host: str) -> None:
    listener = listen(host, 0)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_interface_of_several_hosts_leads_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is left alone: it may have faster ones."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    cluster = LaunchCluster(1, 2, 1, ("127.0.0.1", 29500))
    assert certificates.environment(cluster, None, False) == {
        "GLOO_SOCKET_IFNAME": certificates.interface_of("127.0.0.1")
    }
    assert certificates.interface_of("192.0.2.77") is None and certificates.interface_of("2001:db8::77") is None
