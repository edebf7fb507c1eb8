# SPDX-License-Identifier: Apache-2.0
"""The seal of chains: their lengths and last hashes, signed with the key of the job's authority.

`DIR/seal-0.json` is of host 0, and covers the workers of that host. The signature is ECDSA over P-256 with SHA-256, of
the canonical text of all fields but itself, after a word that no certificate begins with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_plugins.receipts import chain
from paceline_plugins.receipts.chain import canonical, chain_name

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from paceline.communication.sockets.certificates import Authority

PURPOSE = b"paceline receipts 1\n"


def seal_name(host: int) -> str:
    """File name of a host's seal."""
    return f"seal-{host}.json"


def fingerprint(certificate: Certificate) -> str:
    """SHA-256 of the authority's public key, hexadecimal."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(
        certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def pem(certificate: Certificate) -> str:
    """The certificate as text."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()


def fingerprint_of(text: str) -> str:
    """The fingerprint of a certificate's text.

    Raises:
        ValueError: it is no certificate.
    """
    from cryptography import x509

    return fingerprint(x509.load_pem_x509_certificate(text.encode()))


def write(folder: Path, authority: Authority, host: int, ranks: Sequence[int]) -> list[int]:
    """Seal the chains of a host's workers; returns the workers that have none.

    Raises:
        OSError: the files cannot be read or written.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    there = [rank for rank in ranks if (folder / chain_name(rank)).is_file()]
    chains = {str(rank): chain.read(folder / chain_name(rank), rank) for rank in there}
    body: dict[str, Any] = {
        "job": authority.job,
        "host": host,
        "chains": {rank: [one.count, one.head] for rank, one in chains.items()},
        "certificate": pem(authority.certificate),
    }
    signed = authority.key.sign(PURPOSE + canonical(body).encode(), ec.ECDSA(hashes.SHA256()))
    new = folder / f".{seal_name(host)}"
    new.write_text(canonical({**body, "signature": base64.b64encode(signed).decode()}) + "\n", encoding="utf-8")
    os.replace(new, folder / seal_name(host))
    return sorted(set(ranks) - set(there))


@dataclass(frozen=True)
class Seal:
    """A seal whose signature holds."""

    name: str  # of its file
    job: str  # the job of the authority
    authority: str  # fingerprint of its key
    chains: dict[int, tuple[int, str]]  # rank -> (lines, hash of the last one)


def read(path: Path) -> Seal:
    """A seal, whose signature is that of the key in its own certificate.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or the signature is another one's.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        signature = base64.b64decode(found.pop("signature"), validate=True)
        certificate = x509.load_pem_x509_certificate(found["certificate"].encode())
        chains = {int(rank): (int(lines), str(head)) for rank, (lines, head) in found["chains"].items()}
        key = certificate.public_key()
        job, text = str(found["job"]), canonical(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} is no seal: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"{path.name} is no seal: its key is of another kind")
    try:
        key.verify(signature, PURPOSE + text.encode(), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise ValueError(f"{path.name} was altered after it was signed: the signature does not fit it") from error
    return Seal(path.name, job, fingerprint(certificate), chains)
