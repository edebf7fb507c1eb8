# SPDX-License-Identifier: Apache-2.0
"""Rules of packets for a namespace, given to the kernel over netlink, so that no program `nft` is needed."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

from .delay import NETLINK_NETFILTER, enter

ANSWER_S = 10.0


def within(namespace: str, work: Callable[[], None]) -> None:
    """Do `work` in a namespace: that of a thread, which ends with it.

    Raises:
        OSError: the kernel cannot do it.
    """
    failed: list[OSError] = []

    def run() -> None:
        try:
            enter(f"/run/netns/{namespace}")
            work()
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="paceline-netfilter")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def give(batch: bytes, answers: int, what: str) -> None:
    """Give the kernel rules, and wait for its answer to each message that asks for one.

    Raises:
        OSError: it refuses `what`.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as kernel:
        kernel.bind((0, 0))
        kernel.settimeout(ANSWER_S)
        kernel.send(batch)
        for _ in range(answers):
            code: int = struct.unpack_from("=i", kernel.recv(4096), 16)[0]
            if code:
                raise OSError(-code, f"netfilter refuses {what}: error {-code}")
