# SPDX-License-Identifier: Apache-2.0
"""Sites behind routers that translate addresses, and one host that all of them reach.

    with SitesNetwork(sites=2, rate_mbit=20, delay_ms=40) as network:
        subprocess.run([*network.prefix(1), "python", "train.py"])      # inside the first site

Host 0 is public. Each further host is alone in a private network, the same addresses in every one, behind a router of
its own: the router's cable is what is shaped, cut and mended, and outside all of the host's connections come from the
router's address. Nobody reaches the host from outside. The delay is that of a packet to the other end of a connection,
once, so that what goes from one site to another through host 0 takes it twice.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from .delay import (
    ACK,
    APPEND,
    BATCH_BEGIN,
    BATCH_END,
    CREATE,
    IPV4,
    NEW_CHAIN,
    NEW_RULE,
    NEW_TABLE,
    attribute,
    expression,
    message,
    nest,
    number,
    text,
)
from .emulated import EmulatedNetwork, EmulationError, _inside, _link
from .netfilter import give, within

POST_ROUTING, SOURCE_NAT = 4, 100  # where a router translates, and when among its other rules
OUTGOING = 5  # the key of the interface by which a packet leaves
INSIDE, ROUTER = "192.168.1.2", "192.168.1.1"


class SitesNetwork(EmulatedNetwork):
    """A public host, and hosts behind routers, for as long as the `with` lasts.

    Args:
        sites: how many hosts behind routers; they are hosts 1, 2 ..
        rate_mbit: of every router's link, each direction, Mbit/s.
        delay_ms: of a connection to another site or to host 0, one way, milliseconds.
        public_mbit: of host 0's link.
    """

    subnet = "44.83.48"  # no private one, so that programs see sites as on the internet

    def __init__(self, sites: int, rate_mbit: float, delay_ms: float, public_mbit: float = 1000.0) -> None:
        super().__init__(1 + sites, [public_mbit] + [rate_mbit] * sites, delay_ms)
        self._cables = [self._names[0], *(name.replace("-h", "-r") for name in self._names[1:])]

    def _add(self, host: int) -> None:
        if host == 0:
            super()._add(0)
            return
        from pyroute2 import netns

        router, inside = self._cables[host], self._names[host]
        netns.create(router)
        super()._add(host)
        with _inside(router) as links:
            links.link("add", ifname="lan", kind="veth", peer={"ifname": self.interface(host), "net_ns_fd": inside})
            links.addr("add", index=_link(links, "lan")["index"], address=ROUTER, prefixlen=24)
            self._up(links, "lan")
        with _inside(inside) as links:
            links.link("set", index=_link(links, "lo")["index"], state="up")
            links.addr("add", index=_link(links, self.interface(host))["index"], address=INSIDE, prefixlen=24)
            self._up(links, self.interface(host))
            links.route("add", dst="0.0.0.0/0", gateway=ROUTER)
        translate(router, self.interface(host))


def translate(namespace: str, interface: str) -> None:
    """Let a namespace forward packets, and put its own address on those that leave by `interface`.

    Raises:
        EmulationError: the kernel cannot do it.
    """

    def work() -> None:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        give(translation(socket.if_nametoindex(interface)), 1, "to translate addresses")

    try:
        within(namespace, work)
    except OSError as error:
        raise EmulationError(
            f"no router can be made here ({error}); it needs nftables with masquerade in the kernel"
        ) from error


def translation(index: int) -> bytes:
    """The batch that lets packets which leave by an interface have its address."""
    table = text(1, "nat")
    hook = nest(4, number(1, POST_ROUTING), number(2, SOURCE_NAT))
    leaves = [
        expression("meta", number(1, 1), number(2, OUTGOING)),
        expression("cmp", number(1, 1), number(2, 0), nest(3, attribute(1, struct.pack("=I", index)))),
    ]
    rule = nest(4, *leaves, expression("masq"))
    return b"".join(
        [
            message(BATCH_BEGIN, 0, 0, 10),
            message(NEW_TABLE, CREATE, IPV4, 0, table),
            message(NEW_CHAIN, CREATE, IPV4, 0, table, text(3, "out"), hook, text(7, "nat")),
            message(NEW_RULE, CREATE | APPEND | ACK, IPV4, 0, text(1, "nat"), text(2, "out"), rule),
            message(BATCH_END, 0, 0, 10),
        ]
    )
