# SPDX-License-Identifier: Apache-2.0
"""A certificate is its holder's: who claims another rank, another job or another role is refused, and both ends say so.

Each test has somebody with a certificate that OpenSSL may well accept, and a rightful worker that is served after it.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from paceline.communication.ring import RingListener, RingTransport
from paceline.communication.ring.wire import HELLO, Address
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.channel import TLS, Listener, connect
from paceline.communication.sockets.identity import CONTROL, WORKER, rank_role
from paceline.core.world import World
from paceline.errors import GivenUpError, MismatchError, PeerLostError, RefusedError
from paceline.flow.control import wire
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Terms
from paceline.update.server.protocol import FrameKind
from paceline.update.server.rendezvous import _Acceptor
from tests.communication.connections import HERE, SOON
from tests.flow.control.cluster import begin, control, member, wait_for

DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.timezone.utc)


@pytest.fixture(scope="module")
def job() -> Authority:
    return Authority.new()


@dataclass
class Maker:
    """Makes certificates of the job that are not as they should be."""

    job: Authority
    folder: Path

    def good(self, name: str, role: str = WORKER) -> TLS:
        return self.job.issue(self.folder / name, name, role)

    def foreign(self, name: str) -> TLS:
        """Of another job, whose holder trusts this one."""
        other = Authority.new().issue(self.folder / name, name, WORKER)
        other.authority.write_bytes(self.good("trusted").authority.read_bytes())
        return other

    def bad(
        self,
        name: str,
        after: datetime.timedelta = -DAY,
        until: datetime.timedelta = DAY,
        purpose: x509.ObjectIdentifier | None = None,
        signs_itself: bool = False,
    ) -> TLS:
        place = self.folder / name
        place.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer = subject if signs_itself else self.job.certificate.subject
        uri = f"urn:paceline:{self.job.job}:{'a' * 32}:{WORKER}"
        builder = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), 7, NOW + after, NOW + until)
            .add_extension(x509.BasicConstraints(False, None), True)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), False)
        )
        if purpose is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), False)
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        signed = builder.sign(key if signs_itself else self.job.key, hashes.SHA256())
        (place / "key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
        (place / "cert.pem").write_bytes(signed.public_bytes(pem))
        (place / "ca.pem").write_bytes(self.job.certificate.public_bytes(pem))
        return TLS.folder(place)


@pytest.fixture
def make(job: Authority, tmp_path: Path) -> Maker:
    return Maker(job, tmp_path)


BAD: dict[str, Callable[[Maker], TLS]] = {
    "has expired": lambda make: make.bad("expired", -10 * DAY, -DAY),
    "is not valid yet": lambda make: make.bad("early", DAY, 2 * DAY),
    "is signed by itself": lambda make: make.bad("alone", signs_itself=True),
    "is not of this job's authority": lambda make: make.foreign("foreign"),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_certificate_is_refused_at_the_listener(
    make: Maker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Both ends say what is wrong with it; the next worker is taken."""
    caplog.set_level("INFO", "paceline.doors")
    good, bad = make.good("good"), BAD[why](make)
    monkeypatch.setattr(TLS, "identity", good.identity)  # the client does not look, either
    with Listener(HERE, good) as listener, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(listener.accept, SOON)
        with pytest.raises(MismatchError, match=r"refuses the certificate of this end|no TLS with"):
            connect(HERE, listener.port, "worker 3", SOON, bad)
        with connect(HERE, listener.port, "worker 3", SOON, good), coming.result():
            pass
    assert f"its certificate {why}" in caplog.text


@pytest.mark.parametrize("why", BAD)
def test_a_bad_certificate_is_refused_by_who_connects(make: Maker, why: str) -> None:
    good, bad = make.good("good"), BAD[why](make)
    with Listener(HERE, bad) as listener, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(listener.accept, SOON)
        with pytest.raises(MismatchError, match=rf"no TLS with worker 3 at .*: its certificate {why}"):
            connect(HERE, listener.port, "worker 3", SOON, good)
        listener.close()
        with pytest.raises(PeerLostError):
            coming.result()


@pytest.mark.parametrize(
    ("purpose", "listens"), [(ExtendedKeyUsageOID.CLIENT_AUTH, True), (ExtendedKeyUsageOID.SERVER_AUTH, False)]
)
def test_a_certificate_for_one_end_is_not_good_for_the_other(
    make: Maker, purpose: x509.ObjectIdentifier, listens: bool
) -> None:
    good, bad = make.good("good"), make.bad("half", purpose=purpose)
    here, there = (bad, good) if listens else (good, bad)
    with Listener(HERE, here) as listener, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(listener.accept, SOON)
        with pytest.raises(MismatchError, match="is made for another purpose"):
            connect(HERE, listener.port, "worker 3", SOON, there)
        listener.close()
        with pytest.raises(PeerLostError):
            coming.result()


def test_a_bundle_of_authorities_does_not_let_another_job_in(make: Maker, tmp_path: Path) -> None:
    """Both trust both authorities, as with a company's file of all of them: the certificates say of which job."""
    one, other = make.good("one"), Authority.new().issue(tmp_path / "other", "other", WORKER)
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(one.authority.read_bytes() + other.authority.read_bytes())
    one, other = (TLS(tls.certificate, tls.key, bundle) for tls in (one, other))
    with Listener(HERE, one) as listener, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(listener.accept, SOON)
        with pytest.raises(
            MismatchError, match=r"no TLS with worker 3 .*'one' .* is of job \w+, and .*'other' .* of job"
        ):
            connect(HERE, listener.port, "worker 3", SOON, other)
        with connect(HERE, listener.port, "worker 3", SOON, one), coming.result():
            pass


def test_a_ring_wants_each_ranks_own_certificate(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 says that it is rank 2: it is told why not, and the ring is made with the rightful one."""
    caplog.set_level("INFO", "paceline.doors")
    files = [make.good(f"r{rank}", rank_role(rank)) for rank in range(3)]
    doors = [RingListener(HERE, tls) for tls in files]
    places = [Address(HERE, door.port, rank_role(rank)) for rank, door in enumerate(doors)]
    first = RingTransport(doors[0], "job", World(0, 3), places, SOON)
    with connect(HERE, doors[0].port, "rank 0", SOON, files[1]) as liar:
        liar.send(HELLO, (2, 1000), note="job")
        said = liar.receive(deadline_s=SOON).note["why"]
        with pytest.raises(PeerLostError):
            liar.receive(deadline_s=SOON)
    assert "'r1' (rank-1" in said and "claims to be rank 2, which has another certificate" in said
    assert said in caplog.text
    others = [RingTransport(doors[rank], "job", World(rank, 3), places, SOON) for rank in (1, 2)]
    waits = [one.all_reduce(x) for one, x in zip([first, *others], torch.ones(3, 4).unbind(), strict=True)]
    for wait in waits:
        wait.wait()
    for one in [first, *others]:
        one.close()
    for door in doors:
        door.close()


def test_asynchronous_workers_are_the_ranks_of_their_certificates(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows the token, and is no rank 2."""
    caplog.set_level("INFO", "paceline.doors")
    files, token = [make.good(f"r{rank}", rank_role(rank)) for rank in range(3)], "f" * 32
    with Listener(HERE, files[0]) as listener:
        door = _Acceptor(listener, World(0, 3), token)
        with connect(HERE, listener.port, "rank 0", SOON, files[1]) as liar:
            liar.send(FrameKind.HELLO, (2,), note=token)
            with pytest.raises(PeerLostError):
                liar.receive(deadline_s=SOON)
        with connect(HERE, listener.port, "rank 0", SOON, files[2]) as rightful:
            rightful.send(FrameKind.HELLO, (2,), note=token)
            with door._changed:
                assert door._changed.wait_for(lambda: 2 in door.incoming, SOON)
            assert door.incoming[2].identity is not None and door.incoming[2].identity.role == "rank-2"
        said = wait_for(lambda: caplog.text)
        assert "'r1' (rank-1" in said and "claims to be rank 2, which has another certificate" in said
        for channel in door.close():
            channel.close()


def test_the_control_plane_ties_a_worker_to_its_certificate(make: Maker, tmp_path: Path) -> None:
    """With worker 0's number and secret, worker 1's certificate gets neither its requests nor its heartbeats."""
    plane = make.good("control", CONTROL)
    one, other = make.good("one"), make.good("two")
    with control(Terms(max_workers=4), tmp_path / "record.json", plane) as (server, log):
        first, second = member(server.port, one), member(server.port, other)
        begin(first)
        number, secret = first.identity()
        for hello in ((wire.BACK, (number, 0, 0), {"secret": secret, "marks": []}), (wire.PULSE, (number,), secret)):
            with connect(HERE, server.port, "control", SOON, other) as liar:
                liar.send(hello[0], hello[1], note=hello[2])
                said = liar.receive(deadline_s=SOON)
                assert said.kind == wire.REFUSED and "'two' (worker, " in said.note
                assert "claims to be worker 0, which is the holder of the certificate of 'one'" in said.note
        log.wait("refused")
        assert {place.certificate for place in first.generation.members} <= {one.identity.id, other.identity.id}
        assert server.status()["lost"] == 0
        for client in (first, second):
            client.close()


def test_the_control_planes_certificate_is_no_workers(make: Maker) -> None:
    plane = make.good("control", CONTROL)
    with control(Terms(), None, plane) as (server, log):
        with pytest.raises(RefusedError, match="has the certificate of a control plane"):
            member(server.port, plane)
        assert "claims to be a worker" in log.wait("refused")["why"]


REVOKED = "its key was stolen"


def test_a_revoked_certificate(make: Maker, tmp_path: Path) -> None:
    """Its worker is put out at once; the others go on and know why, and so does a restarted control plane."""
    plane, files = make.good("control", CONTROL), [make.good(name) for name in ("one", "two")]
    record = tmp_path / "record.json"
    with control(Terms(max_workers=4, expected=2, start_s=SOON), record, plane) as (server, log):
        clients = [member(server.port, tls) for tls in files]
        for client in clients:
            client.enter()
        for client in clients:
            client.holds_state(client.generation.number)
        assert server.revoke([1], [], False, REVOKED) == [1]
        with pytest.raises(GivenUpError, match=rf"worker 1 .* its certificate was revoked: {REVOKED}"):
            clients[1].failed(1, "a ring was cut", [])
        assert clients[0].failed(1, "a ring was cut", []).workers == [0]
        assert REVOKED in clients[0].generation.reason
        refused = rf"'two' \(worker, \w+\) is refused: its certificate was revoked: {REVOKED}"
        with pytest.raises(RefusedError, match=refused):
            member(server.port, files[1])
        assert log.wait("revoked")["workers"] == [1]
        port = server.port
    with control(Terms(max_workers=4), record, plane, port) as (server, _):
        with pytest.raises(RefusedError, match=refused):
            member(server.port, files[1])
        fresh = member(server.port, make.good("three"))
        server.revoke([], [], True, "job.pem was stolen")
        with pytest.raises(RefusedError, match=r"it is new, and no new certificates are accepted: job\.pem was stolen"):
            member(server.port, make.good("four"))
        again = member(server.port, files[0])  # which has joined before
        with pytest.raises(RefusedError, match="no certificate is known here of worker 77"):
            server.revoke([77], [], False, REVOKED)
        for client in (*clients, fresh, again):
            client.close()


def test_in_the_clear_there_is_nothing_to_revoke() -> None:
    with control(Terms()) as (server, _):
        client = member(server.port)
        with pytest.raises(RefusedError, match="no certificate is known here of worker 0"):
            server.revoke([0], [], False, REVOKED)
        assert isinstance(client.enter().workers, list)
        client.close()


def test_a_worker_that_poses_as_the_control_plane(make: Maker) -> None:
    with control(Terms(), None, make.good("two")) as (server, _):
        with pytest.raises(
            MismatchError, match=r"'two' \(worker, \w+\) claims to be the control plane, which has another"
        ):
            ControlClient(HERE, server.port, About("host", HERE, 1, {}), make.good("one"), SOON)


class RingLater:
    """A listener whose connections are taken and left alone."""

    def __init__(self, tls: TLS) -> None:
        self._listener = Listener(HERE, tls)
        self.port = self._listener.port
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for channel in self._listener.accept_while(lambda: True):
            channel.close()

    def __enter__(self) -> RingLater:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(SOON)


def test_who_listens_at_a_ranks_address_has_to_be_that_rank(make: Maker) -> None:
    files = [make.good(f"r{rank}", rank_role(rank)) for rank in (0, 1)]
    with RingLater(files[1]) as impostor:  # listens where rank 0 should
        door = RingListener(HERE, files[1])
        places = [Address(HERE, impostor.port, rank_role(0)), Address(HERE, door.port, rank_role(1))]
        one = RingTransport(door, "job", World(1, 2), places, SOON)
        with pytest.raises(PeerLostError, match=r"'r1' \(rank-1, \w+\) claims to be rank 0, which has another"):
            one.all_reduce(torch.ones(3)).wait()
        one.close()
        door.close()


def test_certificates_that_users_share_among_the_workers_of_a_host(make: Maker) -> None:
    """They name a host, and may be any of its ranks."""
    host = make.good("host-0", "host")
    with control(Terms(max_workers=2, expected=2, start_s=SOON), None, host) as (server, _):
        both = [member(server.port, host) for _ in range(2)]
        assert [one.enter().workers for one in both] == [[0, 1]] * 2
        for one in both:
            one.close()
