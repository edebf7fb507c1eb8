# SPDX-License-Identifier: Apache-2.0
"""Two workers that cannot reach each other talk through a relay, and who has no certificate of the job does not."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.communication.ring import RingListener, RingTransport
from paceline.communication.ring.wire import Address
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.channel import TLS, Channel, Late, Listener, connect
from paceline.core.world import World
from paceline.errors import MismatchError, PeerLostError, UnsupportedError
from paceline_plugins.sites.relay import member, protocol, server
from paceline_plugins.sites.relay.member import RelayMember
from paceline_plugins.sites.relay.places import RelayedPlace
from paceline_plugins.sites.relay.protocol import MEMBER, STREAM, line, member_name, prelude
from paceline_plugins.sites.relay.server import RelayServer
from tests.communication.connections import HERE, SOON, both
from tests.waiting import until

SHORT = 0.2


class Job:
    """An authority, and what it signs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority, self.count = folder, Authority.new(), 0

    def tls(self, role: str = "worker") -> TLS:
        self.count += 1
        return self.authority.issue(self.folder / str(self.count), f"one {self.count}", role)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def relay(job: Job) -> Iterator[RelayServer]:
    with RelayServer(HERE, 0, job.tls("control")) as found:
        yield found


def refuse(sock: socket.socket, caller: str) -> None:
    raise AssertionError("nobody calls here")


@contextlib.contextmanager
def entered(relay: RelayServer, tls: TLS, nonce: str, adopt: member.Adopt = refuse) -> Iterator[RelayMember]:
    name = nonce if nonce == protocol.CONTROL_NAME else member_name(tls.identity.id, nonce)
    found = RelayMember((HERE, relay.port), name, tls, adopt, SOON)
    try:
        yield found
    finally:
        found.close()


@contextlib.contextmanager
def listening(relay: RelayServer, tls: TLS, nonce: str = "a") -> Iterator[tuple[Listener, str]]:
    """A listener that is reached through the relay alone, and its name there."""
    with Listener(HERE, tls) as listener, entered(relay, tls, nonce, listener.adopt) as found:
        yield listener, found.name


def ends(caller: RelayMember, listener: Listener, name: str) -> tuple[Channel, Channel]:
    near, far = both(lambda: caller.connect(name, "the other", SOON), lambda: listener.accept(SOON))
    return near, far


def test_a_stream_carries_the_same_bytes_both_ways_and_its_ends_know_each_other(relay: RelayServer, job: Job) -> None:
    mine, other = job.tls(), job.tls()
    with listening(relay, other) as (listener, name), entered(relay, mine, "b") as caller:
        near, far = ends(caller, listener, name)
        with near, far:
            assert near.identity is not None and near.identity.id == other.identity.id  # end to end, not the relay's
            assert far.identity is not None and far.identity.id == mine.identity.id
            assert far.peer.startswith(HERE)
            sent = torch.randint(256, (3_000_000,), dtype=torch.uint8)
            for one, two in ((near, far), (far, near)):
                _, got = both(lambda one=one: one.send(1, body=sent), lambda two=two: two.receive())  # type: ignore[misc]
                assert torch.equal(got.body, sent)


def test_a_relay_sees_ciphertext_only(relay: RelayServer, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = bytearray()

    async def pump(self: RelayServer, source: socket.socket, target: socket.socket) -> None:
        while data := await self._loop.sock_recv(source, 1 << 16):
            seen.extend(data)
            await self._loop.sock_sendall(target, data)

    monkeypatch.setattr(RelayServer, "_pump", pump)
    with listening(relay, job.tls()) as (listener, name), entered(relay, job.tls(), "b") as caller:
        near, far = ends(caller, listener, name)
        with near, far:
            near.send(1, note="the secret of the model")
            assert far.receive(deadline_s=SOON).note == "the secret of the model"
    assert len(seen) > 100 and b"the secret" not in seen


def test_an_end_that_goes_is_noticed_by_the_other(relay: RelayServer, job: Job) -> None:
    with listening(relay, job.tls()) as (listener, name), entered(relay, job.tls(), "b") as caller:
        near, far = ends(caller, listener, name)
        near.send(1, note="last")
        near.close()
        with far, pytest.raises(PeerLostError):
            assert far.receive(deadline_s=SOON).note == "last"
            far.receive(deadline_s=SOON)
        until(lambda: relay._streams == 0)


def test_a_reader_that_is_slow_holds_up_the_writer_and_not_the_relay_s_memory(relay: RelayServer, job: Job) -> None:
    with listening(relay, job.tls()) as (listener, name), entered(relay, job.tls(), "b") as caller:
        near, far = ends(caller, listener, name)
        with near, far:
            lot = torch.zeros(64 << 20, dtype=torch.uint8)
            with pytest.raises(Late):
                near.send(1, body=lot, deadline_s=1.0)  # the buffers of the kernel and no more
            # and others are served meanwhile
            one, two = ends(caller, listener, name)
            one.send(1, note="still here")
            assert two.receive(deadline_s=SOON).note == "still here"
            one.close()
            two.close()


def test_who_is_not_there_yet_is_called_again(relay: RelayServer, job: Job) -> None:
    other = job.tls()
    with entered(relay, job.tls(), "b") as caller:
        with pytest.raises(Late, match=r"is not at the relay"):
            caller.connect(member_name(other.identity.id, "a"), "rank 1", SHORT)
        came = threading.Thread(
            target=lambda: got.append(caller.connect(member_name(other.identity.id, "a"), "x", SOON))
        )
        got: list[Channel] = []
        came.start()
        with listening(relay, other) as (listener, _):
            listener.accept(SOON).close()
            came.join(SOON)
        assert len(got) == 1
        got[0].close()


def test_a_relay_that_is_started_again_at_its_port_serves_as_before(job: Job) -> None:
    first = RelayServer(HERE, 0, job.tls("control"))
    first.start()
    with listening(first, job.tls()) as (listener, name), entered(first, job.tls(), "b") as caller:
        first.close()
        with pytest.raises(Late):
            caller.connect(name, "rank 1", SHORT)
        with RelayServer(HERE, first.port, job.tls("control")):
            near, far = ends(caller, listener, name)
            near.close()
            far.close()


def test_members_of_one_site_connect_directly_and_others_through_the_relay(relay: RelayServer, job: Job) -> None:
    mine, other = job.tls(), job.tls()
    with Listener(HERE, mine) as own, Listener(HERE, other) as listener:
        place = RelayedPlace((HERE, relay.port), mine, own.adopt, SOON)
        there = RelayedPlace((HERE, relay.port), other, listener.adopt, SOON)
        try:
            assert place.address.endswith("@lan") and there.address.endswith("@lan")
            address, elsewhere = (HERE, listener.port), there.address.replace("@lan", "@198.51.100.7")
            for door, streams in ((there.address, 0), (elsewhere, 1)):
                near, far = both(
                    lambda door=door: place.dial(address, other.identity.id, door, "rank 1", SOON),  # type: ignore[misc]
                    lambda: listener.accept(SOON),
                )
                assert relay._streams == streams
                near.close()
                far.close()
                until(lambda: relay._streams == 0)
        finally:
            place.close()
            there.close()


def test_another_host_with_the_member_s_address_is_not_taken_for_it(relay: RelayServer, job: Job) -> None:
    """Two sites often have the same private addresses."""
    mine, other, imposter = job.tls(), job.tls(), job.tls()
    with Listener(HERE, mine) as own, Listener(HERE, other) as listener, Listener(HERE, imposter) as wrong:
        place = RelayedPlace((HERE, relay.port), mine, own.adopt, SOON)
        there = RelayedPlace((HERE, relay.port), other, listener.adopt, SOON)
        try:
            near, mistaken, far = both(
                lambda: place.dial((HERE, wrong.port), other.identity.id, there.address, "rank 1", SOON),
                lambda: wrong.accept(SOON),
                lambda: listener.accept(SOON),
            )
            assert near.identity.id == other.identity.id
            for channel in (near, mistaken, far):
                channel.close()
        finally:
            place.close()
            there.close()


def test_a_ring_through_a_relay_sums_as_any_ring(relay: RelayServer, job: Job) -> None:
    certificates = [job.tls() for _ in range(3)]
    dialers = [lambda adopt, tls=tls: RelayedPlace((HERE, relay.port), tls, adopt, SOON) for tls in certificates]
    listeners = [RingListener(HERE, tls, dialers=one) for tls, one in zip(certificates, dialers, strict=True)]
    places = [one.dialer for one in listeners]
    addresses = [
        Address(HERE, 1, tls.identity.id, place.address.replace("@lan", f"@198.51.100.{k}"))
        for k, (tls, place) in enumerate(zip(certificates, places, strict=True))
    ]
    rings = [RingTransport(one, "all", World(rank, 3), addresses, SOON) for rank, one in enumerate(listeners)]
    tensors = [torch.full((200_000,), float(1 + rank)) for rank in range(3)]
    for pending in [ring.all_reduce(x) for ring, x in zip(rings, tensors, strict=True)]:
        pending.wait()
    assert all(torch.equal(x, torch.full((200_000,), 6.0)) for x in tensors)
    assert relay._streams == 3  # each pair has one
    for one in (*rings, *listeners):
        one.close()


# ---- who has no business there ---------------------------------------------------------------------------------------
def knock(relay: RelayServer, data: bytes) -> bytes:
    """Send something, and what comes back until the relay closes the connection."""
    with socket.create_connection((HERE, relay.port), timeout=SOON) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionError):
            return b"".join(iter(lambda: sock.recv(1000), b""))
    return b""


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(48),
        bytes(48),
        hashlib.sha512(b"noise").digest(),
        protocol.MAGIC + b"X" + bytes(32),
        b"paceline relay\x02M" + bytes(32),
        b"\x16\x03\x01" + bytes(64),
    ],
)
def test_garbage_is_closed_at_once(relay: RelayServer, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline.doors")
    assert knock(relay, data) == b""
    assert "it does not speak a relay's language" in caplog.text


def test_who_says_nothing_is_closed_after_a_while(
    relay: RelayServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paceline.doors")
    monkeypatch.setattr(server, "GREET_S", SHORT)
    for data in (b"", prelude(MEMBER)[:20], prelude(MEMBER)):
        assert knock(relay, data) == b""
    assert caplog.text.count("silent for too long") >= 2


def test_a_certificate_of_another_job_gets_nothing(relay: RelayServer, tmp_path: Path) -> None:
    foreign = Job(tmp_path).tls()
    with pytest.raises((MismatchError, Late), match=r"authority|cannot be reached"), entered(relay, foreign, "a"):
        pass
    assert not relay._members


@pytest.mark.parametrize("role", ["worker", "rank-3"])
def test_a_worker_cannot_pose_as_the_control_plane(relay: RelayServer, job: Job, role: str) -> None:
    with pytest.raises(MismatchError, match="claims to be the control plane"), entered(relay, job.tls(role), "control"):
        pass


def test_a_member_cannot_take_the_name_of_another(relay: RelayServer, job: Job) -> None:
    mine, other = job.tls(), job.tls()
    with listening(relay, other) as (_, name):
        before = relay._members[name]
        with pytest.raises(MismatchError, match="which is of another certificate"):
            RelayMember((HERE, relay.port), name, mine, refuse, SOON)
        assert relay._members[name] is before


@pytest.mark.parametrize("name", ["", "x" * 200, "a\nb", "é", "control.1", ".", "host-1"])
def test_names_that_are_none_are_refused(relay: RelayServer, job: Job, name: str) -> None:
    with pytest.raises(MismatchError, match=r"name|control"):
        RelayMember((HERE, relay.port), name, job.tls(), refuse, SOON)


def test_a_second_control_plane_is_refused_while_the_first_is_there(relay: RelayServer, job: Job) -> None:
    with entered(relay, job.tls("control"), "control"):
        with pytest.raises(MismatchError, match="one run at a time"), entered(relay, job.tls("control"), "control"):
            pass
    until(lambda: "control" not in relay._members)
    with entered(relay, job.tls("control"), "control"):
        pass


def test_a_ticket_is_good_once_and_a_guessed_one_never(
    relay: RelayServer, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paceline.doors")
    used = list[bytes]()
    join = RelayServer._join_stream

    async def noting(self: RelayServer, sock: socket.socket, ticket: bytes) -> bool:
        used.append(ticket)
        return await join(self, sock, ticket)

    monkeypatch.setattr(RelayServer, "_join_stream", noting)
    with listening(relay, job.tls()) as (listener, name), entered(relay, job.tls(), "b") as caller:
        near, far = ends(caller, listener, name)
        with near, far:
            for ticket in (*used, bytes(32), b"\xff" * 32):
                assert knock(relay, prelude(STREAM, ticket) + b"something") == b""
            near.send(1, note="undisturbed")
            assert far.receive(deadline_s=SOON).note == "undisturbed"
    assert len(used) == 6 and caplog.text.count("its ticket was not given out here") == 4


def test_lines_that_make_no_sense_end_their_member_alone(relay: RelayServer, job: Job) -> None:
    tls = job.tls()
    with listening(relay, job.tls()) as (listener, name), entered(relay, job.tls(), "b") as caller:
        for words in (b"no JSON\n", b"[1]\n", b"x" * 10_000 + b"\n", b"[" * 4000 + b"\n"):
            with socket.create_connection((HERE, relay.port), timeout=SOON) as raw:
                raw.sendall(prelude(MEMBER))
                with tls.client().wrap_socket(raw) as sock:
                    sock.sendall(line(name=member_name(tls.identity.id, "c"), life="1"))
                    assert b"welcome" in sock.recv(1000)
                    sock.sendall(words)
                    with contextlib.suppress(ConnectionError):
                        assert sock.recv(1000) == b""
        for said in ({"call": 3, "serial": []}, {"call": name}, {"serial": 1}, {}):
            with socket.create_connection((HERE, relay.port), timeout=SOON) as raw:
                raw.sendall(prelude(MEMBER))
                with tls.client().wrap_socket(raw) as sock:
                    sock.sendall(line(name=member_name(tls.identity.id, "c"), life="1") + line(**said))
                    assert b"welcome" in sock.recv(1000)
                    assert sock.recv(1000).endswith(b"\n")
        near, far = ends(caller, listener, name)
        near.close()
        far.close()


def test_what_cannot_be_listened_at_is_refused(relay: RelayServer, job: Job) -> None:
    for address, port in ((HERE, relay.port), ("192.0.2.1", 0), ("no such host.", 0), ("0.0.0.0", 0), ("::", 0)):
        with pytest.raises(UnsupportedError, match=r"relay (cannot listen|takes one address)"):
            RelayServer(address, port, job.tls())


def test_a_relay_that_is_not_there_is_named(job: Job) -> None:
    with socket.create_server((HERE, 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(Late, match=f"the relay at {HERE}, port {port} cannot be reached within"):
        RelayMember((HERE, port), "x", job.tls(), refuse, SHORT)


@pytest.mark.parametrize("secured", [False, True])
def test_a_listener_takes_connections_of_elsewhere_like_its_own(job: Job, secured: bool) -> None:
    tls = job.tls() if secured else None
    with Listener(HERE, tls) as listener, socket.create_server((HERE, 0)) as door:
        where = door.getsockname()

        def take() -> list[Channel]:
            for _ in range(3):
                sock, peer = door.accept()
                sock.setblocking(False)
                listener.adopt(sock, f"{peer[0]}:{peer[1]}")
            return [listener.accept(SOON) for _ in range(3)]

        far, *near = both(take, *[lambda: connect(*where, "it", SOON, tls)] * 3)
        for channel in (*far, *near):
            channel.close()
    listener.adopt(socket.socket(), "late:1")  # it is closed: so is this


def test_a_member_comes_back_under_its_name_after_its_connection_was_cut(relay: RelayServer, job: Job) -> None:
    with listening(relay, job.tls()) as (listener, name), entered(relay, job.tls(), "b") as caller:
        before = relay._members[name]
        relay._loop.call_soon_threadsafe(before.writer.transport.abort)
        until(lambda: relay._members.get(name) not in (before, None))
        near, far = ends(caller, listener, name)
        near.close()
        far.close()
