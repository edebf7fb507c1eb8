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


def test_a_master_that_is_no_address_of_this_host() -> None:
    """Then it is for torch to listen everywhere: something in between passes connections on."""
    assert listen("192.0.2.77", 0) is None


def test_a_host_that_knows_its_own_name_by_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's installer sets it up; others come to another address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listen("node0", 0) is None


def test_the_interface_of_one_host_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """For gloo and NCCL, unless the user has chosen."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    lo = certificates.interface_of("127.0.0.1")
    assert lo is not None and certificates.environment(LaunchCluster(2), None, False) == {
        "GLOO_SOCKET_IFNAME": lo,
        "NCCL_SOCKET_IFNAME": lo,
    }
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert certificates.environment(LaunchCluster(2), None, False) == {"NCCL_SOCKET_IFNAME": lo}


def test_the_interface_of_several_hosts_leads_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is left alone: it may have faster ones."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    cluster = LaunchCluster(1, 2, 1, ("127.0.0.1", 29500))
    assert certificates.environment(cluster, None, False) == {
        "GLOO_SOCKET_IFNAME": certificates.interface_of("127.0.0.1")
    }
    assert certificates.interface_of("192.0.2.77") is None and certificates.interface_of("2001:db8::77") is None
