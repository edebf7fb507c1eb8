# SPDX-License-Identifier: Apache-2.0
"""An invitation is one line; the relay that it is of makes certificates for who has it, and for nobody else."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from paceline.communication.sockets.certificates import Authority, write_folder
from paceline.communication.sockets.channel import Listener, connect
from paceline.errors import PeerLostError, UnsupportedError
from paceline_plugins.sites.relay import enrolment, invitation
from paceline_plugins.sites.relay.enrolment import MOST_KEYS, Registrar, enrol
from paceline_plugins.sites.relay.invitation import LEAD, Invitation
from paceline_plugins.sites.relay.protocol import ENROL, prelude
from paceline_plugins.sites.relay.server import RelayServer
from tests.communication.connections import HERE, SOON, both

KEY = ec.generate_private_key(ec.SECP256R1())


def pem(key: ec.EllipticCurvePrivateKey = KEY) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def of(authority: Authority, port: int, **more: object) -> Invitation:
    return Invitation(HERE, port, authority.fingerprint(), **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def relay(folder: Path, authority: Authority, known: Sequence[Invitation], port: int = 0) -> Iterator[RelayServer]:
    with RelayServer(HERE, port, authority.issue(folder, "relay", "control"), Registrar(authority, known)) as server:
        yield server


@given(
    host=st.from_regex(r"[a-z0-9.-]{1,60}", fullmatch=True),
    port=st.integers(1, 65535),
    key=st.binary(min_size=16, max_size=16),
    mark=st.binary(min_size=16, max_size=16),
    purpose=st.sampled_from([1, 2]),
)
def test_a_line_says_what_was_put_in(host: str, port: int, key: bytes, mark: bytes, purpose: int) -> None:
    said = Invitation(host, port, mark, key, int(time.time()) + 100, purpose)
    assert Invitation.read(said.text()) == said
    assert Invitation.read(f"  {said.text()[:30]}\n{said.text()[30:]}\n") == said  # as a mail breaks it
    assert said.text().isascii() and len(said.text()) < 80 + 2 * len(host)


GOOD = Invitation("relay.example", 29700, bytes(16), bytes(range(16)), 4_000_000_000)
LINE = GOOD.text()


def of_version(version: int) -> str:
    body = bytes([version]) + base64.urlsafe_b64decode(LINE[len(invitation.PREFIX) :] + "==")[1:-4]
    return invitation.PREFIX + base64.urlsafe_b64encode(body + invitation._checksum(body)).decode().rstrip("=")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no invitation"),
        ("hello", "no invitation"),
        ("10.0.0.1:29600", "no invitation"),
        ("job.pem", "no invitation"),
        ("paceline-", "damaged"),
        (LINE[:-1], "damaged"),
        (LINE[:40], "damaged"),
        (LINE[:30] + ("A" if LINE[30] != "A" else "B") + LINE[31:], "damaged"),
        (LINE + LINE[len(invitation.PREFIX) :], "damaged"),
        (LINE.replace("paceline-", "paceline-é"), "damaged"),
        ("paceline-" + "!" * 60, "damaged"),
        (LINE.upper(), "no invitation"),
        (of_version(2), "of version 2"),
        (Invitation("relay.example", 1, bytes(16), bytes(16), 1_700_000_000).text(), "good until 2023-11-14 22:13 UTC"),
    ],
)
def test_what_is_no_invitation_is_refused_without_being_repeated(text: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says) as caught:
        Invitation.read(text)
    assert text[9:] not in str(caught.value) or len(text) < 20


@given(st.integers(len(invitation.PREFIX), len(LINE) - 1), st.integers(1, 63))
def test_no_character_can_be_changed(place: int, by: int) -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    other = letters[(letters.index(LINE[place]) + by) % 64]
    try:
        read = Invitation.read(LINE[:place] + other + LINE[place + 1 :])
    except UnsupportedError:
        return
    assert read == GOOD and place == len(LINE) - 1  # bits of the last character that carry nothing


def test_who_has_it_gets_certificates_that_the_others_accept(tmp_path: Path) -> None:
    authority = Authority.new()
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    good = of(authority, port)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    with relay(tmp_path / "relay", authority, [good], port):
        ca, signed, run = enrol(good, [pem(key) for key in keys], "far\x1baway")
    assert run == {}
    made = [write_folder(tmp_path / str(k), *one, ca) for k, one in enumerate(zip(keys, signed, strict=True))]
    assert {one.identity.role for one in made} == {"worker"} and len({one.identity.id for one in made}) == 3
    assert {one.identity.job for one in made} == {authority.job}
    assert made[0].identity.name == "far away 0"
    with Listener(HERE, authority.issue(tmp_path / "old", "old", "worker")) as listener:
        near, far = both(lambda: connect(HERE, listener.port, "old", SOON, made[0]), lambda: listener.accept(SOON))
        assert far.identity == made[0].identity
        near.close()
        far.close()


def test_only_the_leading_launcher_gets_a_certificate_of_the_control_plane(tmp_path: Path) -> None:
    authority = Authority.new()
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    lead = of(authority, port, purpose=LEAD)
    with relay(tmp_path / "relay", authority, [lead], port):
        ca, signed, _ = enrol(lead, [pem(), pem()], "lead")
    roles = [write_folder(tmp_path / str(k), KEY, one, ca).identity.role for k, one in enumerate(signed)]
    assert roles == ["control", "worker"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Authority, RelayServer, Invitation]]:
    authority = Authority.new()
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    good, old = of(authority, port), of(authority, port, until_s=1_700_000_000, key=b"o" * 16)
    with relay(tmp_path_factory.mktemp("relay"), authority, [good, old], port) as server:
        yield authority, server, good


Job = tuple[Authority, RelayServer, Invitation]


def test_wrong_invitations_are_refused_with_a_reason(job: Job) -> None:
    authority, server, good = job
    with pytest.raises(UnsupportedError, match="does not know this invitation: it is of another run"):
        enrol(of(Authority.new(), server.port), [pem()], "x")
    with pytest.raises(UnsupportedError, match="was good until 2023"):  # the host's own clock may be wrong
        enrol(of(authority, server.port, until_s=4_000_000_000, key=b"o" * 16), [pem()], "x")
    with pytest.raises(UnsupportedError, match="it has another authority"):  # who has an invitation poses as the relay
        enrol(Invitation(HERE, server.port, bytes(16), good.key), [pem()], "x")
    with pytest.raises(UnsupportedError, match=f"1 to {MOST_KEYS} certificates, it asks for 0"):
        enrol(good, [], "x")
    with pytest.raises(UnsupportedError, match=f"1 to {MOST_KEYS} certificates"):
        enrol(good, [pem()] * (MOST_KEYS + 1), "x")
    for key in (b"none", ec.generate_private_key(ec.SECP384R1()).public_key()):
        text = key if isinstance(key, bytes) else key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(UnsupportedError, match="a key cannot be signed"):
            enrol(good, [text], "x")


def talk(server: RelayServer, name: bytes, say: bytes) -> bytes:
    """What comes after the challenge."""
    with socket.create_connection((HERE, server.port), timeout=SOON) as sock:
        sock.sendall(prelude(ENROL, name))
        assert len(sock.recv(32)) == 32
        sock.sendall(say)
        with contextlib.suppress(ConnectionError):
            return b"".join(iter(lambda: sock.recv(1000), b""))
    return b""


def test_a_recorded_request_is_worth_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    _, server, good = job
    sent: list[bytes] = []
    message = enrolment._message
    monkeypatch.setattr(enrolment, "_message", lambda *parts: sent.append(message(*parts)) or sent[-1])
    enrol(good, [pem()], "x")
    request = sent[0]
    assert b"keys" in request
    assert talk(server, good.name, request) == b""  # another challenge
    assert talk(server, good.name, request[:-1] + bytes([request[-1] ^ 1])) == b""


@pytest.mark.parametrize("size", [0, 1, (1 << 18) + 1, (1 << 32) - 1])
def test_lengths_are_bounded_before_memory_is(job: Job, size: int) -> None:
    _, server, good = job
    assert talk(server, good.name, size.to_bytes(4, "big") + bytes(40)) in (b"",)


def test_a_relay_without_an_authority_makes_no_certificates(tmp_path: Path) -> None:
    authority = Authority.new()
    with RelayServer(HERE, 0, authority.issue(tmp_path, "relay", "control")) as server:
        with pytest.raises(PeerLostError):
            enrol(of(authority, server.port), [pem()], "x")


def test_a_relay_that_lies_is_found_out(job: Job) -> None:
    """It knows the name of the key, which goes over the wire, and the authority, which is public; and not the key."""
    authority, _, good = job
    other = Authority.new()
    answers = [
        {
            "authority": authority.pem().decode(),
            "certificates": [other.certify(pem(), "x", "worker").decode()],
            "run": {},
        },
        {"authority": other.pem().decode(), "certificates": [other.certify(pem(), "x", "worker").decode()], "run": {}},
        {"authority": "none", "certificates": [], "run": {}},
        {"authority": 3},
        [],
    ]

    def serve(door: socket.socket) -> None:
        for answer in answers:
            sock, _ = door.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(bytes(32))
                sock.recv(1000)
                sock.sendall(enrolment._message(json.dumps(answer).encode(), bytes(32)))

    with socket.create_server((HERE, 0)) as door:
        thread = threading.Thread(target=serve, args=(door,))
        thread.start()
        for _ in answers:
            with pytest.raises(UnsupportedError, match=r"is no relay of this job|is not the relay that"):
                enrol(Invitation(HERE, door.getsockname()[1], good.fingerprint, good.key), [pem()], "x")
        thread.join(SOON)


def test_its_key_is_not_shown() -> None:
    said = Invitation("relay.example", 29700, bytes(16))
    assert said.key.hex() not in repr(said) and repr(said.key) not in repr(said)
