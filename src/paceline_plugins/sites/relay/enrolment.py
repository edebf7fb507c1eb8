# SPDX-License-Identifier: Apache-2.0
"""How a host with an invitation gets certificates: it sends public keys, and its private keys never leave it.

::

    host   prelude "E" with the name of its key
    relay  32 random bytes, the challenge
    host   {"host", "keys": [PEM, ..]}    with its HMAC-SHA256 under the invitation's key, over challenge and text
    relay  {"authority", "certificates", "run"} or {"refused"}, with the HMAC over the request's and the text

Nothing of it is secret, so nothing is encrypted; who does not have the key can change nothing, and a recorded request
fits no other challenge. Of the answer, the authority must have the invitation's fingerprint as well.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.framing import set_options
from paceline.communication.sockets.identity import CONTROL, WORKER
from paceline.communication.sockets.rejected import turned_away
from paceline.errors import MismatchError, PacelineError, PeerLostError, UnsupportedError
from paceline_plugins.sites.relay.invitation import LEAD, Invitation, fingerprint
from paceline_plugins.sites.relay.protocol import ENROL, prelude

CHALLENGE_BYTES = 32
MAC_BYTES = 32
MOST_BYTES = 1 << 18
MOST_KEYS = 256
"""Certificates of one request: the launcher's, and one for each of its workers."""
ATTEMPT_S = 20.0
"""Seconds that a host takes for it."""
_LENGTH = struct.Struct(">I")
_NO_MAC = bytes(MAC_BYTES)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _message(text: bytes, mac: bytes) -> bytes:
    return _LENGTH.pack(len(text)) + text + mac


class Registrar:
    """Makes certificates for those who have an invitation.

    Args:
        authority: of the job.
        invitations: that are good; of one that has ended the relay says so.
        run: options of the run that all its hosts share, as JSON.
    """

    def __init__(
        self, authority: Authority, invitations: Sequence[Invitation], run: Mapping[str, Any] | None = None
    ) -> None:
        self._authority, self._run = authority, dict(run or {})
        self._invitations: Mapping[bytes, Invitation] = {one.name: one for one in invitations}

    async def serve(
        self, name: bytes, receive: Callable[[int], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Serve one host, which has named its key; PacelineError if it does not have it."""
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        await send(challenge)
        (length,) = _LENGTH.unpack(await receive(_LENGTH.size))
        if length > MOST_BYTES:
            raise MismatchError(f"a request for certificates of {length} bytes, at most {MOST_BYTES} are taken")
        text, mac = await receive(length), await receive(MAC_BYTES)
        invitation = self._invitations.get(name)
        if invitation is None:
            why = "it does not know this invitation: it is of another run or another relay"
            await send(_message(json.dumps({"refused": why}).encode(), _NO_MAC))
            raise PacelineError("it has an invitation that is not of this relay")
        if not hmac.compare_digest(mac, _mac(invitation.key, challenge, text)):
            raise PacelineError("it names an invitation whose key it does not have")
        try:
            said: dict[str, Any] = self._sign(invitation, text)
        except MismatchError as error:
            said = {"refused": str(error)}
            turned_away("a host with an invitation", error)
        answer = json.dumps(said).encode()
        await send(_message(answer, _mac(invitation.key, mac, answer)))

    def _sign(self, invitation: Invitation, text: bytes) -> dict[str, Any]:
        if invitation.over:
            raise MismatchError(f"the invitation was good until {invitation.until}: ask for a new one")
        try:
            said = json.loads(text)
            host, keys = str(said["host"])[:40], [str(key).encode() for key in said["keys"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise MismatchError(f"the request for certificates makes no sense: {error}") from error
        if not 0 < len(keys) <= MOST_KEYS:
            raise MismatchError(f"a host gets 1 to {MOST_KEYS} certificates, it asks for {len(keys)}")
        host = "".join(one if one.isprintable() else " " for one in host)
        first = CONTROL if invitation.purpose == LEAD else WORKER
        roles = [first, *[WORKER] * (len(keys) - 1)]
        names = [f"{host} {number}"[:64] for number in range(len(keys))]
        try:
            signed = [self._authority.certify(*one) for one in zip(keys, names, roles, strict=True)]
        except (ValueError, TypeError) as error:
            raise MismatchError(f"a key cannot be signed: {error}") from error
        made = {"authority": self._authority.pem().decode(), "certificates": [one.decode() for one in signed]}
        return {**made, "run": self._run}


class Answer(NamedTuple):
    """What a relay gives for an invitation: PEM of the authority and of each key, and options of the run."""

    authority: bytes
    certificates: list[bytes]
    run: dict[str, Any]


def enrol(invitation: Invitation, keys: Sequence[bytes], host: str) -> Answer:
    """Ask the relay for certificates.

    Args:
        invitation: of the job.
        keys: public keys, as PEM.
        host: this host's name, for display.

    Raises:
        PeerLostError: the relay cannot be reached.
        UnsupportedError: it refuses the invitation, or is not the job's.
    """
    where = f"{invitation.host}, port {invitation.port}"
    text = json.dumps({"host": host, "keys": [key.decode() for key in keys]}).encode()
    try:
        with socket.create_connection((invitation.host, invitation.port), timeout=ATTEMPT_S) as sock:
            set_options(sock)
            sock.settimeout(ATTEMPT_S)
            sock.sendall(prelude(ENROL, invitation.name))
            mac = _mac(invitation.key, _take(sock, CHALLENGE_BYTES), text)
            sock.sendall(_message(text, mac))
            (length,) = _LENGTH.unpack(_take(sock, _LENGTH.size))
            if length > MOST_BYTES:
                raise UnsupportedError(f"what listens at {where} is no relay of this job")
            answer, proof = _take(sock, length), _take(sock, MAC_BYTES)
    except OSError as error:
        raise PeerLostError(
            f"the relay at {where} cannot be reached: {error}; does the launcher of the run still run, and does this "
            "host reach that port?"
        ) from error
    return _read_answer(invitation, where, answer, proof, _mac(invitation.key, mac, answer))


def _read_answer(invitation: Invitation, where: str, answer: bytes, proof: bytes, expected: bytes) -> Answer:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        said = json.loads(answer)
        refused = said.get("refused")
        if refused is not None:
            raise UnsupportedError(f"the relay at {where} refuses the invitation: {str(refused)[:300]}")
        authority = str(said["authority"]).encode()
        signed, run = [str(one).encode() for one in said["certificates"]], dict(said["run"])
        own = fingerprint(x509.load_pem_x509_certificate(authority).public_bytes(Encoding.DER))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedError(f"what listens at {where} is no relay of this job: {error}") from error
    if not hmac.compare_digest(proof, expected) or own != invitation.fingerprint:
        raise UnsupportedError(
            f"what listens at {where} is not the relay that the invitation is from: it has another authority"
        )
    return Answer(authority, signed, run)


def _take(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = sock.recv(size - len(got))
        if not more:
            raise ConnectionError("it closed the connection")
        got += more
    return got
