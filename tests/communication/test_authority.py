# SPDX-License-Identifier: Apache-2.0
"""A job's own authority: what it signs is taken, what anybody else signs is not, and its secret is for its owner."""

from __future__ import annotations

import datetime
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from paceline.communication.sockets import certificates
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.channel import TLS, Listener, connect
from paceline.errors import MismatchError, PeerLostError, UnsupportedError
from tests.communication.connections import HERE, SOON, pair


@pytest.fixture(scope="module")
def job() -> Authority:
    return Authority.new()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(listening: TLS, visiting: TLS) -> None:
    """Two who must not come together: the visitor hears of it."""
    with Listener(HERE, listening) as listener, ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(listener.accept, SOON)
        with pytest.raises((MismatchError, PeerLostError), match="TLS"):
            connect(HERE, listener.port, "server", SOON, visiting)
        listener.close()
        with pytest.raises(PeerLostError, match="closed"):
            greeting.result()


def test_two_hosts_of_one_job(tmp_path: Path) -> None:
    """The second has nothing but the file that was copied to it."""
    Authority.make(tmp_path / "certificates").export(tmp_path / "job.pem")
    first = Authority.load(tmp_path / "job.pem").issue(tmp_path / "one", "host-0")
    second = Authority.load(tmp_path / "job.pem").issue(tmp_path / "two", "host-1")
    with Listener(HERE, first) as listener, ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(listener.accept, SOON)
        with connect(HERE, listener.port, "server", SOON, second) as channel, greeting.result() as other:
            channel.send(1, (7,))
            assert other.receive(deadline_s=SOON).numbers[0] == 7


def test_a_workers_certificate_is_good_for_both_ends(job: Authority, tmp_path: Path) -> None:
    with pair(job.issue(tmp_path / "worker", "worker")) as (near, far):
        near.send(1, note="hello")
        assert far.receive(deadline_s=SOON).note == "hello"


def test_only_their_owner_can_read_secrets(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Authority.make(tmp_path / "certificates")
        made.export(tmp_path / "job.pem")
        made.issue(tmp_path / "certificates" / "worker", "worker")
    finally:
        os.umask(before)
    assert sorted(path.name for path in (tmp_path / "certificates").iterdir()) == ["ca-key.pem", "ca.pem", "worker"]
    assert sorted(path.name for path in (tmp_path / "certificates" / "worker").iterdir()) == [
        "ca.pem",
        "cert.pem",
        "key.pem",
    ]
    folders = [tmp_path / "certificates", tmp_path / "certificates" / "worker"]
    secrets = [
        tmp_path / "job.pem",
        tmp_path / "certificates" / "ca-key.pem",
        tmp_path / "certificates" / "worker" / "key.pem",
    ]
    assert [mode(path) for path in folders] == [0o700] * 2 and [mode(path) for path in secrets] == [0o600] * 3


def test_a_worker_cannot_sign_certificates(job: Authority, tmp_path: Path) -> None:
    """What a worker has signed with its own key is refused, with its certificate shown beside it."""
    own = job.issue(tmp_path / "own", "worker")
    key = load_pem_private_key(own.key.read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    thief = Authority(key, x509.load_pem_x509_certificate(own.certificate.read_bytes()))
    forged = thief.issue(tmp_path / "forged", "worker")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(forged.certificate.read_bytes() + own.certificate.read_bytes())
    refused(own, TLS(chain, forged.key, own.authority))


def test_how_long_it_is_good(job: Authority, tmp_path: Path) -> None:
    """From a day ago, for clocks that go wrong, and never longer than what has signed it."""
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = x509.load_pem_x509_certificate(job.issue(tmp_path, "worker").certificate.read_bytes())
    for one in (job.certificate, signed):
        assert one.not_valid_before_utc < now - datetime.timedelta(hours=23)
        assert datetime.timedelta(weeks=25) < one.not_valid_after_utc - now < datetime.timedelta(weeks=27)
    assert signed.not_valid_after_utc <= job.certificate.not_valid_after_utc


def test_an_expired_authority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(certificates, "WEEKS", -1 / 14)
    old = Authority.new()
    worker = old.issue(tmp_path / "worker", "worker")
    refused(worker, worker)
    with pytest.raises(UnsupportedError, match=r"job\.pem was good until 20.* UTC; begin the job again"):
        Authority.load(old.export(tmp_path / "job.pem"))


def test_a_job_file_that_others_can_read(job: Authority, tmp_path: Path) -> None:
    path = job.export(tmp_path / "job.pem")
    path.chmod(0o640)
    with pytest.warns(UserWarning, match=r"others than you can read .*job\.pem.*: chmod 600"):
        Authority.load(path)


def test_job_files_that_are_none(job: Authority, tmp_path: Path) -> None:
    good, worker = job.export(tmp_path / "job.pem").read_bytes(), job.issue(tmp_path / "worker", "worker")
    cases = {
        b"": "cannot be used",
        good[:150]: "cannot be used",
        good.replace(b"A", b"B"): "cannot be used",
        good[: good.index(b"-----BEGIN CERT")]: "cannot be used",
        worker.key.read_bytes() + worker.certificate.read_bytes(): r"worker's certificate and not a job's",
        worker.key.read_bytes() + worker.authority.read_bytes(): "its key is not that of its certificate",
    }
    for data, says in cases.items():
        path = tmp_path / "bad.pem"
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(UnsupportedError, match=rf"bad\.pem .*{says}"):
            Authority.load(path)
    with pytest.raises(UnsupportedError, match=r"nowhere\.pem cannot be used as a job's file: .*No such file"):
        Authority.load(tmp_path / "nowhere.pem")


def test_places_that_cannot_be_written(job: Authority, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match="cannot make the folder"):
        job.issue(tmp_path / "file" / "folder", "worker")
    with pytest.raises(UnsupportedError, match="cannot write"):
        job.export(tmp_path / "nowhere" / "job.pem")
    with pytest.raises(UnsupportedError, match="1 to 64 characters"):
        job.issue(tmp_path / "folder", "x" * 65)
    assert not list(tmp_path.glob("**/.*"))


def test_a_file_is_replaced_and_not_written_through(job: Authority, tmp_path: Path) -> None:
    """A link that somebody has put there leads nowhere."""
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    (tmp_path / "job.pem").symlink_to(target)
    job.export(tmp_path / "job.pem")
    assert target.read_text() == "untouched" and not (tmp_path / "job.pem").is_symlink()
