# SPDX-License-Identifier: Apache-2.0
"""An invitation: one line with all that a host needs to join a run, wherever it is.

::

    version  what for  until  key   fingerprint  port  host   checksum       in base64url, after "paceline-"
    u8       u8        u32    16 B  16 B         u16   text   4 B

The key is enough to get certificates of the job while the invitation lasts, so keep the line as secret as a password.
The fingerprint is that of the job's authority: who has another invitation to the relay cannot pose as it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import struct
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone

from paceline.errors import UnsupportedError

PREFIX = "paceline-"
VERSION = 1
JOIN, LEAD = 1, 2
"""What it is for: workers that join, or the launcher that hosts the control plane."""
VALID_S = 7 * 86400.0
"""Seconds for which an invitation is good."""
_LAYOUT = struct.Struct(">BBI16s16sH")
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class Invitation:
    """What the line says."""

    host: str  # of the relay
    port: int  # of the relay
    fingerprint: bytes  # of the job's authority, 16 bytes
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)  # 16 bytes
    until_s: int = field(default_factory=lambda: int(time.time() + VALID_S))  # when it ends, seconds since 1970
    purpose: int = JOIN  # JOIN or LEAD

    @property
    def name(self) -> bytes:
        """32 bytes by which the relay finds the key."""
        return hashlib.sha256(b"paceline invitation " + self.key).digest()

    @property
    def where(self) -> str:
        """HOST:PORT of the relay."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def until(self) -> str:
        """When it ends, for messages."""
        return f"{datetime.fromtimestamp(self.until_s, timezone.utc):%Y-%m-%d %H:%M} UTC"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return time.time() > self.until_s

    def text(self) -> str:
        """The line."""
        host = self.host.encode("idna" if not self.host.isascii() else "ascii")
        head = _LAYOUT.pack(VERSION, self.purpose, self.until_s, self.key, self.fingerprint, self.port)
        body = head + host
        return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")

    @classmethod
    def read(cls, text: str, over: bool = False) -> Invitation:
        """The inverse of `text`; with `over`, also of one that has ended.

        Raises:
            UnsupportedError: it is no invitation, damaged, of another version, or has ended. The message does not
                repeat it.
        """
        said = "".join(text.split())
        if not said.startswith(PREFIX):
            raise UnsupportedError(
                f"this is no invitation: one begins with {PREFIX!r}; copy the whole line that the launcher printed"
            )
        try:
            data = base64.b64decode(said[len(PREFIX) :] + "=" * (-(len(said) - len(PREFIX)) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if len(body) <= _LAYOUT.size or _checksum(body) != checksum:
            raise UnsupportedError(
                f"the invitation is damaged: its checksum does not fit its {len(said)} characters; copy the whole line "
                "that the launcher printed again"
            )
        version, purpose, until_s, key, fingerprint, port = _LAYOUT.unpack(body[: _LAYOUT.size])
        if version != VERSION or purpose not in (JOIN, LEAD):
            raise UnsupportedError(
                f"the invitation is of version {version}, here they have version {VERSION}: install one paceline on "
                "all hosts"
            )
        host = body[_LAYOUT.size :].decode("ascii", "replace")
        found = cls(host, port, fingerprint, key, until_s, purpose)
        if found.over and not over:
            raise UnsupportedError(
                f"the invitation was good until {found.until}: ask for a new one, or set this host's clock"
            )
        return found


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"paceline checksum " + body).digest()[:_CHECKSUM_BYTES]


def fingerprint(certificate_der: bytes) -> bytes:
    """The fingerprint of an authority, of its certificate in DER."""
    return hashlib.sha256(certificate_der).digest()[:16]
