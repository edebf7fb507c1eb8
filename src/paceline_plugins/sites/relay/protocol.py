# SPDX-License-Identifier: Apache-2.0
"""What is said at a relay's port.

Every connection begins with a prelude of 48 bytes in the clear: 15 of `MAGIC`, one that says what it is for, and 32::

    "M"  a member: mutual TLS 1.3 follows, and inside of it lines of JSON
    "S"  one end of a stream: the 32 bytes are a ticket, which is good once; what follows goes to the other end as it is
    "E"  a joining host asks for certificates (:mod:`~paceline_plugins.sites.relay.enrolment`): 32 bytes name its key

A member says {"name", "life"} and gets {"welcome", "site"} or {"refused"}. Its name begins with the ID of its
certificate, so nobody can take another's; `life` tells its next connection from another process's. From then on it says
{"call": NAME, "serial"} and gets {"serial", "ticket"} or {"serial", "absent"}; the member that it called gets {"ring":
TICKET, "from"}. Both then connect with their tickets. The members' own TLS goes through the stream from end to end.

A member's address at the relay is `NONCE@SITE`: what makes its name, beside its certificate, and the router behind
which the relay sees it. The control plane sends it to the other members.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from typing import Any

from paceline.communication.sockets.identity import CONTROL, HOST, Identity
from paceline.errors import MismatchError

MAGIC = b"paceline relay\x01"
MEMBER, STREAM, ENROL = b"M", b"S", b"E"
TICKET_BYTES = 32
PRELUDE_BYTES = len(MAGIC) + 1 + TICKET_BYTES  # 48
NOBODY = bytes(TICKET_BYTES)
LINE = 4096
"""Bytes of a line, at most."""
BEAT_S = 10.0
"""Seconds between two lines of a member, at most: a router forgets connections that are silent for minutes."""
SILENCE_S = 3 * BEAT_S
"""Seconds without a line after which the other end is gone."""
CONTROL_NAME = "control"
"""The name of the control plane."""
BUSY = "a relay serves one run at a time"
"""In a refusal: that name is another process's."""
LAN = "lan"
"""The site of members whose addresses the relay sees as they are: no router lies between."""


def prelude(kind: bytes, ticket: bytes = NOBODY) -> bytes:
    """The first bytes of a connection."""
    return MAGIC + kind + ticket


def read_prelude(data: bytes) -> tuple[bytes, bytes]:
    """Kind and ticket; MismatchError for anything else."""
    kind = data[len(MAGIC) : len(MAGIC) + 1]
    if not data.startswith(MAGIC) or kind not in (MEMBER, STREAM, ENROL):
        raise MismatchError(f"it does not speak a relay's language: {data[:16]!r}")
    return kind, data[len(MAGIC) + 1 :]


def line(**said: Any) -> bytes:
    """A line of a member's conversation."""
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


async def read_line(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """The next line.

    Raises:
        MismatchError: it is no JSON object, or too long.
        ConnectionError: the connection has ended.
        TimeoutError: nothing came in time (`asyncio.TimeoutError`).
    """
    try:
        text = await asyncio.wait_for(reader.readline(), seconds)
    except ValueError as error:  # longer than `LINE`
        raise MismatchError(f"a line has at most {LINE} bytes: {error}") from error
    if not text.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"a line is not JSON: {text[:60]!r}") from error
    if not isinstance(said, dict):
        raise MismatchError(f"a line is a JSON object, got {text[:60]!r}")
    return said


async def read_exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes of a socket that does not block; ConnectionError where it ends before."""
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < size:
        more = await loop.sock_recv(sock, size - len(got))
        if not more:
            raise ConnectionError(f"it ended after {len(got)} of {size} bytes")
        got += more
    return got


def name_refusal(name: object, identity: Identity) -> str:
    """Why the holder of that certificate may not have that name; empty if it may."""
    if not isinstance(name, str) or not 0 < len(name) <= 128 or not name.isascii() or not name.isprintable():
        return f"a name is text of 1 to 128 characters, got {name!r:.80}"
    if name == CONTROL_NAME:
        return "" if identity.role in (CONTROL, HOST) else f"{identity} claims to be the control plane"
    owner = name.rpartition(".")[0]
    return "" if owner == identity.id else f"{identity} claims the name {name}, which is of another certificate"


def member_name(certificate: str, nonce: str) -> str:
    """The name of a process that has a certificate of that ID."""
    return f"{certificate}.{nonce}"


def address_of(nonce: str, site: str) -> str:
    """The address of a member."""
    return f"{nonce}@{site}"


def site(address: str) -> str:
    """The site of the member with this address; empty without a relay."""
    return address.partition("@")[2]


def site_of(address: str) -> str:
    """The site of a member that the relay sees at this address: its router's address, or `LAN`."""
    found = ipaddress.ip_address(address.split("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    found = found if mapped is None else mapped
    return LAN if found.is_private or found.is_loopback else str(found)
