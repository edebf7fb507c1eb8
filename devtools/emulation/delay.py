# SPDX-License-Identifier: Apache-2.0
"""A delay line for network namespaces, for kernels without netem: run by `emulated.py` as a program.

In each namespace one nftables rule hands every packet that arrives from outside to an NFQUEUE; this process holds it
for the delay and then lets it go on. Only the packets' numbers come here: their bytes stay in the kernel, and TCP's
large packets (GSO) stay whole, so a delayed gigabit costs some 4,000 short messages a second. The rate is not limited
here but before, by the sender's and the switch's shaping, so that the order is that of a wire: first the queue, then
the propagation. When this process is gone, the kernel drops what arrives: a delay line does not fail open.

    python delay.py DELAY_MS NAMESPACE...     prints "up", ends when its standard input is closed

Standard library only, and no import from the package: the process must start at once and stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
NETLINK_NETFILTER = 12
SOL_NETLINK, NETLINK_NO_ENOBUFS = 270, 5
SO_RCVBUFFORCE = 33
REQUEST, ACK, CREATE, APPEND, NESTED = 0x1, 0x4, 0x400, 0x800, 0x8000
ERROR = 2  # a message of type NLMSG_ERROR is an answer; code 0 in it means done
NFT, QUEUE = 10 << 8, 3 << 8  # subsystems of netfilter
BATCH_BEGIN, BATCH_END, NEW_TABLE, NEW_CHAIN, NEW_RULE = 0x10, 0x11, NFT, NFT | 3, NFT | 6
PACKET, CONFIG, VERDICT_BATCH = QUEUE, QUEUE | 2, QUEUE | 3
IPV4, LOCAL_IN, LOOPBACK_INDEX = 2, 1, 1
ACCEPT = 1
QUEUE_PACKETS = 200_000
ID_AT = 24  # of the packet's number in a message: after both headers and the attribute's own


def attribute(kind: int, value: bytes, nested: bool = False) -> bytes:
    """A netlink attribute, padded to four bytes."""
    head = struct.pack("=HH", 4 + len(value), kind | (NESTED if nested else 0))
    return head + value + bytes(-len(value) % 4)


def nest(kind: int, *inner: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attribute(kind, b"".join(inner), nested=True)


def number(kind: int, value: int) -> bytes:
    """An attribute that holds a 32-bit number in network order."""
    return attribute(kind, struct.pack(">I", value))


def text(kind: int, value: str) -> bytes:
    """An attribute that holds a name."""
    return attribute(kind, value.encode() + b"\0")


def message(kind: int, flags: int, family: int, resource: int, *attributes: bytes) -> bytes:
    """A netfilter message: netlink's header, netfilter's, the attributes."""
    body = struct.pack(">BBH", family, 0, resource) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, REQUEST | flags, 1, 0) + body


def expression(name: str, *data: bytes) -> bytes:
    """One expression of an nftables rule."""
    return nest(1, text(1, name), nest(2, *data))


def to_queue() -> list[bytes]:
    """Two ways to say "to queue 0", of which a kernel may know only one: nftables' own, and that of iptables."""
    return [
        expression("queue", attribute(1, struct.pack(">H", 0))),
        expression("target", text(1, "NFQUEUE"), number(2, 0), attribute(3, bytes(8))),
    ]


def rules(verdict: bytes) -> bytes:
    """A table with one chain of one rule: what comes in, and not over the loopback, goes to queue 0."""
    chain = nest(4, number(1, LOCAL_IN), number(2, 0))
    from_outside = [
        expression("meta", number(1, 1), number(2, 4)),  # register 1 = index of the interface
        expression("cmp", number(1, 1), number(2, 1), nest(3, attribute(1, struct.pack("=I", LOOPBACK_INDEX)))),
    ]
    return b"".join(
        [
            message(BATCH_BEGIN, 0, 0, 10),
            message(NEW_TABLE, CREATE, IPV4, 0, text(1, "delay")),
            message(NEW_CHAIN, CREATE, IPV4, 0, text(1, "delay"), text(3, "in"), chain, text(7, "filter")),
            message(
                NEW_RULE,
                CREATE | APPEND | ACK,
                IPV4,
                0,
                text(1, "delay"),
                text(2, "in"),
                nest(4, *from_outside, verdict),
            ),
            message(BATCH_END, 0, 0, 10),
        ]
    )


class Line:
    """The queue of one namespace."""

    def __init__(self, namespace: str) -> None:
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            enter(f"/run/netns/{namespace}")
            self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        finally:
            _setns(home)
            os.close(home)
        self.socket.bind((0, 0))
        self.socket.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
        self.socket.settimeout(5.0)
        self.waiting: deque[tuple[float, int]] = deque()
        self._buffer = bytearray(4096)
        self._configure()
        self.socket.settimeout(0.0)

    def _configure(self) -> None:
        bind = attribute(1, struct.pack(">BBH", 1, 0, IPV4))
        numbers_only = attribute(2, struct.pack(">IB", 0, 1))
        whole_gso = (number(4, 4), number(5, 4))  # mask, flags: large packets are not cut up for us
        self.ask(message(CONFIG, ACK, 0, 0, bind))
        self.ask(message(CONFIG, ACK, 0, 0, numbers_only, number(3, QUEUE_PACKETS), *whole_gso))
        first, second = to_queue()
        try:
            self.ask(rules(first))
        except OSError:
            self.ask(rules(second))

    def ask(self, request: bytes) -> None:
        """Send what the kernel answers with an error number."""
        self.socket.send(request)
        answer = self.socket.recv(4096)
        kind = struct.unpack_from("=H", answer, 4)[0]
        code = struct.unpack_from("=i", answer, 16)[0] if kind == ERROR else 0
        if code:
            raise OSError(-code, f"netfilter refuses: {os.strerror(-code)}")

    def take(self, due: float) -> None:
        """Note the packets that have arrived."""
        buffer, receive, waiting = self._buffer, self.socket.recv_into, self.waiting
        with contextlib.suppress(BlockingIOError):
            while receive(buffer):
                if buffer[5] << 8 | buffer[4] == PACKET:
                    waiting.append((due, int.from_bytes(buffer[ID_AT : ID_AT + 4], "big")))

    def release(self, now: float) -> None:
        """Let go, in one message, all that have waited long enough."""
        last = -1
        while self.waiting and self.waiting[0][0] <= now:
            last = self.waiting.popleft()[1]
        if last >= 0:
            self.socket.send(message(VERDICT_BATCH, 0, 0, 0, attribute(2, struct.pack(">II", ACCEPT, last))))


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12 only
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def enter(path: str) -> None:
    """Move this thread into a network namespace."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _setns(descriptor)
    finally:
        os.close(descriptor)


def hurry() -> None:
    """Come before the workers that fill the processors: a late delay line is a longer wire."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    with contextlib.suppress(OSError):
        os.nice(-10)


def serve(lines: list[Line], delay_s: float) -> None:
    """Hold every packet for `delay_s`, until standard input ends."""
    by_socket = {line.socket.fileno(): line for line in lines}
    watched = [0, *by_socket]
    clock = time.monotonic
    while True:
        dues = [line.waiting[0][0] for line in lines if line.waiting]
        wait_s = max(0.0, min(dues) - clock()) if dues else None
        ready = select.select(watched, [], [], wait_s)[0]
        if 0 in ready and not os.read(0, 1):
            return
        now = clock()
        for descriptor in ready:
            if descriptor:
                by_socket[descriptor].take(now + delay_s)
        for line in lines:
            line.release(now)


def main() -> None:
    """Set up, say so, and serve."""
    lines = [Line(namespace) for namespace in sys.argv[2:]]
    hurry()
    print("up", flush=True)
    serve(lines, float(sys.argv[1]) / 1e3)


if __name__ == "__main__":
    main()
