# SPDX-License-Identifier: Apache-2.0
"""Whose certificate it is: what the job's authority has signed of the other end, and what that end may claim to be.

A certificate that paceline makes has one name for programs, a URI among its alternative names::

    urn:paceline:JOB:ID:ROLE

JOB names the job's authority, and ID the holder: its certificate may be renewed, and the ID stays. ROLE is `rank-3`
(that rank of a run of a fixed size, and no other), `worker` (of an elastic run, whose control plane numbers it),
`control` (the control plane), or `host` (all of them, for certificates that users share among the workers of a host).
A certificate that another program made has no such name, and counts as a host's.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HOST, WORKER, CONTROL = "host", "worker", "control"
"""Roles; the others are `rank-0`, `rank-1` and so on."""
_URI = re.compile(r"urn:paceline:([0-9a-f]{16}):([0-9a-f]{32}):(host|worker|control|rank-\d{1,9})")


@dataclass(frozen=True)
class Identity:
    """The holder of a certificate; `name` is for messages, and `job` is empty if the certificate does not say."""

    name: str
    id: str
    role: str = HOST
    job: str = ""

    def __str__(self) -> str:
        return f"the holder of the certificate of {self.name!r} ({self.role}, {self.id[:8]})"

    def uri(self) -> str:
        """As the certificate has it."""
        return f"urn:paceline:{self.job}:{self.id}:{self.role}"

    @classmethod
    def read(cls, certificate: Mapping[str, Any]) -> Identity:
        """Of a verified certificate, as `ssl.SSLSocket.getpeercert` gives it."""
        subject = {key: value for part in certificate.get("subject", ()) for key, value in part}
        name = str(subject.get("commonName", "nobody"))[:64]
        result = [_URI.fullmatch(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
        for one in result:
            if one is not None:
                return cls(name, one[2], one[3], one[1])
        return cls(name, f"serial-{str(certificate.get('serialNumber', '')).lstrip('0')}")

    @classmethod
    def of(cls, sock: Any) -> Identity | None:
        """Of the other end of a connection; None without TLS."""
        return cls.read(sock.getpeercert() or {}) if isinstance(sock, ssl.SSLSocket) else None


def job_refusal(own: Identity, other: Identity | None) -> str:
    """Why the other end is not of this end's job; empty if it is, or if the certificates do not say."""
    if other is None or not own.job or other.job == own.job:
        return ""
    return f"{other} is of {f'job {other.job}' if other.job else 'no job'}, and {own} of job {own.job}"


def rank_role(rank: int) -> str:
    """The role of a rank."""
    return f"rank-{rank}"


def refusal(identity: Identity | None, expected: str, claim: str) -> str:
    """Why the other end is not what it claims; empty if it is, or if the connection has no certificates.

    Args:
        identity: of its certificate.
        expected: the role or the ID of who it claims to be; empty if any is good.
        claim: what it claims to be, for the message.
    """
    if identity is None or not expected or identity.id == expected:
        return ""
    named = expected in (WORKER, CONTROL) or expected.startswith("rank-")
    if named and identity.role in (expected, HOST):
        return ""
    return f"{identity} claims to be {claim}, which has another certificate"


_PURPOSE = "is made for another purpose: it must allow both server and client authentication"
HANDSHAKE = {
    "CERTIFICATE_EXPIRED": "has expired; make new certificates, and compare the clocks of the two hosts",
    "certificate has expired": "has expired; make new certificates, and compare the clocks of the two hosts",
    "certificate is not yet valid": "is not valid yet; compare the clocks of the two hosts",
    "UNKNOWN_CA": "is not of this job's authority",
    "self-signed certificate": "is signed by itself and not by this job's authority",
    "self-signed certificate in certificate chain": "is not of this job's authority",
    "unable to get local issuer certificate": "is not of this job's authority",
    "certificate signature failure": "is not of this job's authority: another one has its name",
    "DECRYPT_ERROR": "is not of this job's authority: another one has its name",
    "UNSUPPORTED_CERTIFICATE": _PURPOSE,
    "unsuitable certificate purpose": _PURPOSE,
    "CERTIFICATE_REQUIRED": "is missing",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "is missing",
}
"""What is wrong with a certificate, by OpenSSL's words for it."""


def handshake_failure(error: ssl.SSLError, own: object) -> str:
    """Why a handshake failed, in words; `own` is the file of this end's certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate {HANDSHAKE.get(error.verify_message, error.verify_message)}"
    reason = str(error.reason or error)
    for word, why in HANDSHAKE.items():
        if word.isupper() and reason.endswith(word):
            if word.startswith("PEER"):
                return f"its certificate {why}"
            return f"it refuses the certificate of this end, {own}, which {why}"
    return str(error)
