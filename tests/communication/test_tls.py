# SPDX-License-Identifier: Apache-2.0
"""Who has a certificate of the job's authority may speak, and nobody else."""

from __future__ import annotations

import datetime
import shutil
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from paceline.communication.sockets import channel as channels
from paceline.communication.sockets import framing
from paceline.communication.sockets.channel import TLS, Channel, Late, Listener, connect
from paceline.errors import MismatchError, PeerLostError, UnsupportedError
from tests.communication.connections import HERE, SOON, both, pair

SHORT = 0.2
HUGE = 1 << 22


class Authority:
    """A job's own: it makes folders of a worker's three files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self.name, self.key, True)

    def worker(self, name: str, password: bytes | None = None) -> TLS:
        """A worker's files."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key, False)
        secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        (folder / "key.pem").write_bytes(key.private_bytes(pem, form, secret))
        (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
        (folder / "ca.pem").write_bytes(self.certificate.public_bytes(pem))
        return TLS.folder(folder)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder(
            issuer_name=self.name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(days=1),
            not_valid_after=now + datetime.timedelta(days=1),
        ).add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        return builder.sign(self.key, hashes.SHA256())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("job"), "job")


@pytest.fixture(scope="module")
def tls(job: Authority) -> TLS:
    return job.worker("worker")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TLS:
    """A worker of another job."""
    return Authority(tmp_path_factory.mktemp("other"), "other").worker("worker")


def knock(tls: TLS, visit: Callable[[int], None]) -> None:
    """Let an unwelcome visitor try, by `visit(port)`; the listener takes the worker that comes next, and only that."""
    with Listener(HERE, tls) as listener, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(listener.accept, SOON)
        visit(listener.port)
        assert not coming.done()
        with connect(HERE, listener.port, "server", SOON, tls) as near, coming.result() as far:
            near.send(1, note="of the job")
            assert far.receive(deadline_s=SOON).note == "of the job"


def test_workers_of_one_job_understand_each_other(job: Authority, tls: TLS) -> None:
    """Different certificates; both send much at once, so that reading and writing take turns."""

    def talk(channel: Channel, value: float) -> bool:
        sender = threading.Thread(target=lambda: channel.send(1, body=torch.full((HUGE,), value), note=[1]))
        sender.start()
        frame = channel.receive(torch.empty(HUGE), SOON)
        sender.join()
        assert frame.body is not None
        return frame.body.eq(6.0 - value).all().item() is True and frame.note == [1]

    other = job.worker("another worker")
    with Listener(HERE, tls) as listener:
        near, far = both(lambda: connect(HERE, listener.port, "server", SOON, other), lambda: listener.accept(SOON))
        with near, far:
            assert near._sock.version() == "TLSv1.3"
            assert both(lambda: talk(near, 2.0), lambda: talk(far, 4.0)) == [True, True]
            near.send(2, body=torch.arange(3))
            assert far.receive(deadline_s=SOON).body.tolist() == [0, 1, 2]
            near.close()
            with pytest.raises(PeerLostError, match="closed the connection"):
                far.receive(deadline_s=SOON)


def test_a_key_that_has_encrypted_too_much_is_said_once(
    tls: TLS, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two records of the first frame, one of each small one; on an interpreter that cannot renew it."""
    monkeypatch.setattr(framing, "MOST_RECORDS", 3)
    monkeypatch.setattr(framing, "_key_update", lambda: None)
    with pair(tls) as (near, far):
        near.send(1, body=torch.zeros(20_000, dtype=torch.uint8))
        far.receive(deadline_s=SOON)
        assert near.records_sent >= 2 and far.records_sent == 0
        for _ in range(3):
            near.send(2)
        assert [one.getMessage() for one in caplog.records if "with one key" in one.getMessage()] == [
            "the connection to server has sent 3 records with one key, AES-GCM's margin is for no more (RFC 8446, "
            "5.5), and this Python cannot renew it: see docs/guide/security.md; a new connection has a new key"
        ]


def test_keys_are_renewed_while_both_ends_send(tls: TLS, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL tells of each KeyUpdate that leaves one end; what arrives is what was sent."""
    updates: Counter[str] = Counter()

    def seen(connection: Any, direction: str, version: int, content: int, kind: int, data: bytes) -> None:
        updates[direction] += (content, kind) == (22, 24)  # a handshake message, and its type

    own = TLS.client

    def watched(self: TLS) -> ssl.SSLContext:
        context = own(self)
        context._msg_callback = seen  # type: ignore[attr-defined]
        return context

    monkeypatch.setattr(framing, "MOST_RECORDS", 40)
    monkeypatch.setattr(TLS, "client", watched)
    with pair(tls) as (near, far):

        def talk(channel: Channel, value: int) -> None:
            for number in range(100):
                channel.send(1, [number], torch.full((50_000,), value, dtype=torch.uint8), deadline_s=SOON)

        def listen(channel: Channel, value: int) -> None:
            for number in range(100):
                frame = channel.receive(deadline_s=SOON)
                assert frame.numbers[0] == number and frame.body is not None and frame.body.eq(value).all()

        both(
            lambda: both(lambda: talk(near, 2), lambda: listen(near, 3)),
            lambda: both(lambda: talk(far, 3), lambda: listen(far, 2)),
        )
        assert updates["write"] == near.keys_renewed > 10 and far.keys_renewed > 10
        assert near.records_sent < 40 and far.records_sent < 40
        assert near._sock.version() == "TLSv1.3"


def test_no_key_is_renewed_in_a_layout_that_is_not_known(tls: TLS, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(tls) as (near, _):
        assert framing.renew_key(near._sock)  # type: ignore[arg-type]
        monkeypatch.setattr(framing, "_FIELDS", framing._FIELDS + framing._WORD)
        assert not framing.renew_key(near._sock)  # type: ignore[arg-type]


def test_deadlines_under_tls(tls: TLS) -> None:
    with pair(tls) as (near, far):
        with pytest.raises(Late, match="server did not answer"):
            near.receive(deadline_s=SHORT)
        assert not near.closed
        with pytest.raises(Late, match="did not take what was sent"):
            far.send(1, body=torch.zeros(1 << 24), deadline_s=SHORT)
        assert far.closed


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
def test_a_client_without_a_certificate_or_of_old_is_refused(tls: TLS, newest: ssl.TLSVersion) -> None:
    context = ssl.create_default_context(cafile=tls.authority)
    context.check_hostname = False
    context.maximum_version = newest
    if newest is ssl.TLSVersion.TLSv1_2:
        context.load_cert_chain(tls.certificate, tls.key)

    def visit(port: int) -> None:
        with pytest.raises(OSError, match=r"CERTIFICATE_REQUIRED|PROTOCOL_VERSION|reset"):
            with context.wrap_socket(socket.create_connection((HERE, port))) as sock:
                assert sock.recv(1) == b""
                raise ConnectionResetError("reset, or ended without a word of welcome")

    knock(tls, visit)


def test_a_client_in_the_clear_is_refused(tls: TLS) -> None:
    def visit(port: int) -> None:
        with connect(HERE, port, "server", SOON) as plain:
            plain.send(1, note="let me in")
            with pytest.raises(PeerLostError, match="server"):
                plain.receive(deadline_s=SOON)

    knock(tls, visit)


def test_a_listener_in_the_clear_is_refused(tls: TLS) -> None:
    def accept() -> None:
        with listener.accept(SOON) as plain:
            with pytest.raises(MismatchError, match="these are not paceline's frames"):
                plain.receive(deadline_s=SOON)

    def visit() -> None:
        with pytest.raises((MismatchError, PeerLostError), match="TLS"):
            connect(HERE, listener.port, "server", SOON, tls)

    with Listener(HERE) as listener:
        both(accept, visit)


def test_a_silent_connection_does_not_delay_others(tls: TLS) -> None:
    with Listener(HERE, tls) as listener, ThreadPoolExecutor(1) as pool:
        strangers = [socket.create_connection((HERE, listener.port)) for _ in range(5)]
        coming = pool.submit(listener.accept, SOON)
        with connect(HERE, listener.port, "server", SOON, tls), coming.result():
            for stranger in strangers:
                stranger.close()


@pytest.mark.parametrize(("handshake_s", "strangers", "left"), [(0.0, 64, 0), (SOON, 2, 2)])
def test_further_handshakes_replace_the_oldest(
    tls: TLS, monkeypatch: pytest.MonkeyPatch, handshake_s: float, strangers: int, left: int
) -> None:
    """Those who take too long, and the oldest where there are too many."""
    monkeypatch.setattr(channels, "HANDSHAKE_S", handshake_s)
    monkeypatch.setattr(channels, "STRANGERS", strangers)
    with Listener(HERE, tls) as listener:
        socks = [socket.create_connection((HERE, listener.port)) for _ in range(3)]
        with pytest.raises(Late, match="no peer has connected"):
            listener.accept(SHORT)
        assert len(listener._handshaking) == left
        socks[0].settimeout(SOON)
        assert socks[0].recv(1) == b""
        for sock in socks:
            sock.close()


def test_files_that_are_missing(tls: TLS, tmp_path: Path) -> None:
    shutil.copy(tls.certificate, tmp_path / "cert.pem")
    with pytest.raises(UnsupportedError, match=r"no key\.pem, ca\.pem in .*: TLS needs"):
        TLS.folder(tmp_path)


def test_files_that_are_not_what_they_should_be(job: Authority, tls: TLS, other: TLS) -> None:
    """A protected key is refused without a question on the terminal."""
    protected = job.worker("protected", b"a password")
    for files in (protected, TLS(tls.certificate, other.key, tls.authority), TLS(tls.certificate, tls.key, tls.key)):
        for make in (files.server, files.client):
            with pytest.raises(UnsupportedError, match=r"cannot use the certificate .*cert\.pem, key .*key\.pem"):
                make()
