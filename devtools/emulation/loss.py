# SPDX-License-Identifier: Apache-2.0
"""Packets that a link loses at random, for kernels without netem: used by `emulated.py`.

The switch's bridge gets an nftables table. For every lossy port it has two rules, one for what comes from the host and
one for what goes to it, and each throws a random number for every packet (`numgen`) and drops it where that is low
enough. A large packet of TCP (GSO), which a veth carries whole, is lost whole. The rules are given to the kernel over
netlink, as those of the delay line, so that no program `nft` is needed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

from .delay import (
    ACK,
    APPEND,
    BATCH_BEGIN,
    BATCH_END,
    CREATE,
    NEW_CHAIN,
    NEW_RULE,
    NEW_TABLE,
    NFT,
    expression,
    message,
    nest,
    number,
    text,
)
from .delay import attribute as plain
from .netfilter import give, within

DELETE_TABLE = NFT | 2
BRIDGE, FORWARD = 7, 2  # the family of rules for what a bridge passes on, and the place where they are asked
FROM_PORT, TO_PORT = 4, 5  # keys of a packet's interfaces
RANDOM, TO_NETWORK_ORDER, LESS, DROP = 1, 1, 2, 0
ONE = 1_000_000  # a share is counted in millionths


def rules_of(losses: Mapping[int, float]) -> bytes:
    """The batch that replaces all rules: interface's index -> share of packets to lose."""
    table = text(1, "loss")
    forward = nest(4, number(1, FORWARD), number(2, 0))
    chain = message(NEW_CHAIN, CREATE | ACK, BRIDGE, 0, text(1, "loss"), text(3, "pass"), forward, text(7, "filter"))
    return b"".join(
        [
            message(BATCH_BEGIN, 0, 0, 10),
            message(NEW_TABLE, CREATE, BRIDGE, 0, table),
            message(DELETE_TABLE, 0, BRIDGE, 0, table),
            message(NEW_TABLE, CREATE, BRIDGE, 0, table),
            chain,
            *(_rule(side, port, share) for port, share in losses.items() for side in (FROM_PORT, TO_PORT)),
            message(BATCH_END, 0, 0, 10),
        ]
    )


def _rule(side: int, port: int, share: float) -> bytes:
    """Of the packets whose interface on this side is `port`, drop a share."""
    passes_port = [
        expression("meta", number(1, 1), number(2, side)),
        expression("cmp", number(1, 1), number(2, 0), nest(3, plain(1, struct.pack("=I", port)))),
    ]
    unlucky = [
        expression("numgen", number(1, 1), number(2, ONE), number(3, RANDOM)),
        expression("byteorder", *(number(k, v) for k, v in ((1, 1), (2, 1), (3, TO_NETWORK_ORDER), (4, 4), (5, 4)))),
        expression("cmp", number(1, 1), number(2, LESS), nest(3, number(1, round(share * ONE)))),
    ]
    drop = expression("immediate", number(1, 0), nest(2, nest(2, number(1, DROP))))
    body = nest(4, *passes_port, *unlucky, drop)
    return message(NEW_RULE, CREATE | APPEND | ACK, BRIDGE, 0, text(1, "loss"), text(2, "pass"), body)


def set_losses(namespace: str, losses: Mapping[str, float]) -> None:
    """Let the ports of a switch lose these shares of their packets, and all others none.

    Args:
        namespace: that of the bridge.
        losses: port's name -> share, 0..1.

    Raises:
        OSError: the kernel cannot do it.
    """

    def work() -> None:
        shares = {socket.if_nametoindex(port): share for port, share in losses.items()}
        give(rules_of(shares), 1 + 2 * len(shares), "rules that lose packets")

    within(namespace, work)
