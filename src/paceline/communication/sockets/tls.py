# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS with a certificate authority of the job's own."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.communication.sockets.identity import Identity
from paceline.errors import UnsupportedError


@dataclass(frozen=True)
class TLS:
    """Mutual TLS 1.3: both ends must show a certificate that the job's authority has signed.

    Host names are not checked, because workers join and leave: every certificate that the authority has signed is a
    worker's. So use an authority of the job's own, never a public one. Which worker's it is, the certificate says
    itself: see :mod:`~paceline.communication.sockets.identity`.

    Attributes:
        certificate: PEM file of this worker's certificate; an extended key usage must allow both server and client
            authentication.
        key: PEM file of its private key, without a password.
        authority: PEM file of the job's authority.
    """

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def folder(cls, path: str | Path) -> TLS:
        """The files cert.pem, key.pem and ca.pem of a folder; UnsupportedError names missing ones."""
        files = [Path(path) / name for name in ("cert.pem", "key.pem", "ca.pem")]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UnsupportedError(
                f"no {', '.join(missing)} in {path}: TLS needs this worker's cert.pem and key.pem and the job's ca.pem"
            )
        return cls(*files)

    @cached_property
    def identity(self) -> Identity:
        """Of this end; UnsupportedError if the certificate cannot be read."""
        from cryptography import x509

        try:
            own = x509.load_pem_x509_certificate(self.certificate.read_bytes())
            names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        except x509.ExtensionNotFound:
            uris = []
        except (OSError, ValueError) as error:
            raise UnsupportedError(f"cannot read the certificate {self.certificate}: {error}") from error
        common = own.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return Identity.read(
            {
                "subject": [[("commonName", str(one.value))] for one in common],
                "subjectAltName": [("URI", uri) for uri in uris],
                "serialNumber": f"{own.serial_number:X}",
            }
        )

    def server(self) -> ssl.SSLContext:
        """The context of a listener."""
        context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.num_tickets = 0  # sessions are never resumed, and an unread ticket turns a close into a reset
        return context

    def client(self) -> ssl.SSLContext:
        """The context of a client."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._load(context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            # An empty password: a protected key is an error, not a prompt on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise UnsupportedError(
                f"cannot use the certificate {self.certificate}, key {self.key} and authority {self.authority}: {error}"
            ) from error
        return context
