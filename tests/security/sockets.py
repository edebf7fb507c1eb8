# SPDX-License-Identifier: Apache-2.0
"""Which sockets processes listen at, as the kernel knows it (/proc), whatever library has opened them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from pathlib import Path

LISTENS = "0A"
"""The state of a TCP socket that listens, in /proc/net/tcp."""


def family(pid: int) -> set[int]:
    """A process and all that it has started, and they."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, new = set[int](), [pid]
    while new:
        one = new.pop()
        found.add(one)
        new += parents.get(one, [])
    return found


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket at which one of the processes listens."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):  # no IPv6 here
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and fields[9] in inodes:
                    found.add(_where(fields[1]))
    return found


def loopback(address: str) -> bool:
    """Whether nobody outside of this host can reach the address."""
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it ends while we look
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def _where(text: str) -> tuple[str, int]:
    """The kernel writes an address as words of four bytes in the order of this machine."""
    digits, port = text.split(":")
    raw = bytes.fromhex(digits)
    if sys.byteorder == "little":
        raw = b"".join(raw[k : k + 4][::-1] for k in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(port, 16)
