# SPDX-License-Identifier: Apache-2.0
"""A job's own certificate authority, which signs the certificates of the job's workers.

::

    job = Authority.make("job")               # job/ca.pem, job/ca-key.pem: on the host where the job begins
    job.export("job/job.pem")                 # the one file that another host needs; it is enough to join
    Authority.load("job.pem").issue("job/host-1", "host-1")      # there: cert.pem, key.pem and ca.pem, for `TLS.folder`

Keys use the curve P-256. Only their owner can read the files and enter the folders. What a certificate says of its
holder is in :mod:`~paceline.communication.sockets.identity`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
import warnings
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.communication.sockets.identity import HOST, Identity
from paceline.communication.sockets.tls import TLS
from paceline.errors import UnsupportedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.x509 import Certificate

NAME = "paceline job "
"""An authority's name, before that of its job."""
WEEKS = 26
"""Validity of a job's authority and of what it signs: longer than a run, since none is renewed while it runs."""
SKEW = timedelta(days=1)
"""Tolerated difference between the hosts' clocks."""
SOON = timedelta(weeks=4)
"""`Authority.load` warns of an authority that is good for less."""


@dataclass(frozen=True)
class Authority:
    """The key of a job, and its certificate.

    Attributes:
        key: signs certificates; keep it secret.
        certificate: verifies them.
    """

    key: EllipticCurvePrivateKey
    certificate: Certificate

    @classmethod
    def new(cls) -> Authority:
        """A new authority in memory only."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        return cls(key, _sign(f"{NAME}{secrets.token_hex(8)}", key.public_key(), key, None, ""))

    @classmethod
    def make(cls, folder: str | Path) -> Authority:
        """A new authority; writes its certificate `ca.pem` and its key `ca-key.pem` to `folder`."""
        made, place = cls.new(), _private(folder)
        _write(place / "ca.pem", _pem(made.certificate))
        _write(place / "ca-key.pem", _secret(made.key))
        return made

    def export(self, path: str | Path) -> Path:
        """Write key and certificate to one file that only its owner can read; its folder must exist."""
        target = Path(path)
        _write(target, self.text().encode())
        return target

    def text(self) -> str:
        """Key and certificate, as `export` writes them; for a channel that nobody else reads."""
        return (_secret(self.key) + _pem(self.certificate)).decode()

    @classmethod
    def load(cls, path: str | Path) -> Authority:
        """The authority that `export` has written; warns if other users can read the file.

        Raises:
            UnsupportedError: it cannot be read, is damaged, is no authority's, or has expired.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        file = Path(path)
        try:
            data = file.read_bytes()
            key, certificate = load_pem_private_key(data, None), x509.load_pem_x509_certificate(data)
        except (OSError, ValueError, TypeError) as error:  # TypeError: a key with a password
            raise UnsupportedError(
                f"{file} cannot be used as a job's file: {error}; copy the job.pem of the host that began the job again"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise UnsupportedError(f"{file} is no job's file: its key is not that of its certificate")
        loaded = cls(key, certificate)
        loaded._check(file)
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            warnings.warn(
                f"others than you can read {file}, and who reads it can join the job: chmod 600 {file}", stacklevel=2
            )
        return loaded

    @property
    def job(self) -> str:
        """The name of the job: a number of 16 hexadecimal digits; empty for authorities of earlier versions."""
        from cryptography import x509

        names = [str(one.value) for one in self.certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        job = names[0].removeprefix(NAME) if names else ""
        return job if len(job) == 16 else ""

    def issue(self, folder: str | Path, name: str, role: str = HOST) -> TLS:
        """Make the certificate of a worker or a host: cert.pem, key.pem and ca.pem in `folder`, which is made.

        Args:
            folder: for these three files alone.
            name: of the worker or host, for display; at most 64 characters.
            role: what its holder may be: "rank-3", "worker", "control", or "host" for any of them.
        """
        from cryptography.hazmat.primitives.asymmetric import ec

        if not 0 < len(name) <= 64:
            raise UnsupportedError(f"a certificate is for a name of 1 to 64 characters, got {name!r}")
        key = ec.generate_private_key(ec.SECP256R1())
        return write_folder(folder, key, _pem(self._sign(key.public_key(), name, role)), self.pem())

    def certify(self, public_key: bytes, name: str, role: str) -> bytes:
        """The certificate, as PEM, of a holder whose private key stays with it.

        Args:
            public_key: of the curve P-256, as PEM; ValueError for any other.
            name: of the holder, for display; at most 64 characters.
            role: see `issue`.
        """
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        key = load_pem_public_key(public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("it is not of the curve P-256")
        return _pem(self._sign(key, name, role))

    def pem(self) -> bytes:
        """The authority's certificate."""
        return _pem(self.certificate)

    def fingerprint(self) -> bytes:
        """The first 16 bytes of the sha256 sum of the authority's certificate (DER)."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return hashlib.sha256(self.certificate.public_bytes(Encoding.DER)).digest()[:16]

    def _sign(self, key: EllipticCurvePublicKey, name: str, role: str) -> Certificate:
        uri = Identity(name, secrets.token_hex(16), role, self.job).uri() if self.job else ""
        return _sign(name, key, self.key, self.certificate, uri)

    def _check(self, file: Path) -> None:
        """Refuse a certificate that cannot sign valid certificates."""
        from cryptography import x509

        try:
            signs = self.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except (x509.ExtensionNotFound, ValueError):
            signs = False
        if not signs:
            raise UnsupportedError(f"{file} is a worker's certificate and not a job's: copy job.pem, not cert.pem")
        over = self.certificate.not_valid_after_utc
        if over < datetime.now(timezone.utc):
            raise UnsupportedError(
                f"{file} was good until {over:%Y-%m-%d %H:%M} UTC; begin the job again with a new one"
            )
        if over < datetime.now(timezone.utc) + SOON:
            warnings.warn(
                f"{file} is good until {over:%Y-%m-%d %H:%M} UTC, and so is every certificate that it signs: workers "
                "that must connect later are refused; begin a longer job with a new one",
                stacklevel=3,
            )


def write_folder(folder: str | Path, key: EllipticCurvePrivateKey, certificate: bytes, authority: bytes) -> TLS:
    """Write key.pem, cert.pem and ca.pem to a folder that only its owner can enter."""
    place = _private(folder)
    for name, data in (("key.pem", _secret(key)), ("cert.pem", certificate), ("ca.pem", authority)):
        _write(place / name, data)
    return TLS.folder(place)


def _sign(
    name: str, public: EllipticCurvePublicKey, key: EllipticCurvePrivateKey, authority: Certificate | None, uri: str
) -> Certificate:
    """A certificate for `name`, also called `uri`: the authority's own if `authority` is None."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(timezone.utc)
    over = now + timedelta(weeks=WEEKS)
    own = authority is None  # an authority's key signs certificates, a worker's signs handshakes
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    builder = x509.CertificateBuilder(
        issuer_name=authority.subject if authority is not None else subject,
        subject_name=subject,
        public_key=public,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - SKEW,
        not_valid_after=over if authority is None else min(over, authority.not_valid_after_utc),
    )
    for extension, critical in (
        (x509.BasicConstraints(ca=own, path_length=0 if own else None), True),
        (x509.KeyUsage(digital_signature=not own, key_cert_sign=own, crl_sign=own, **never), True),
        (x509.SubjectKeyIdentifier.from_public_key(public), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    if not own:
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(both, critical=False)
    if uri:
        other = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = builder.add_extension(other, critical=False)
    return builder.sign(key, hashes.SHA256())


def _pem(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _secret(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _private(folder: str | Path) -> Path:
    """Make a folder that only its owner can enter."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.chmod(0o700)
    except OSError as error:
        raise UnsupportedError(f"cannot make the folder {place} for the job's certificates: {error}") from error
    return place


def _write(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, atomically and never readable by others."""
    new = None
    try:
        handle, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with the mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(new, path)
    except OSError as error:
        if new is not None:
            with contextlib.suppress(OSError):
                os.unlink(new)
        raise UnsupportedError(f"cannot write {path}: {error}") from error
