# SPDX-License-Identifier: Apache-2.0
"""How workers find each other: every one listens, tells the others where, and connects to each of them.

The connection that the workers have already carries the addresses, the ports and a token that was drawn for this job.
Whoever connects has to say the token first; a stranger who does not is turned away, and keeps nobody waiting. At the
end all tell each other whether they met everybody, so that either all begin or none does.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time
from collections import deque

from paceline.communication import Transport
from paceline.communication.sockets.address import find_address
from paceline.communication.sockets.channel import TLS, Channel, Listener, connect
from paceline.communication.sockets.rejected import turned_away
from paceline.core.world import World
from paceline.errors import MismatchError, PacelineError, PeerLostError
from paceline.update.server.frames import FrameKind

HELLO = FrameKind.HELLO
"""The first frame of a connection: (rank), and the token as its note."""
HELLO_S = 5.0
"""Seconds in which whoever connects has to say who it is."""

GUESTS = 256
"""Connections that have not said who they are, at most, beside one for each worker that is expected."""

Channels = dict[int, Channel]


def meet(transport: Transport, timeout_s: float, tls: TLS | None) -> tuple[Channels, Channels]:
    """Connections to every other worker, by rank, and those that they have made to this one.

    Raises:
        MismatchError: some workers have certificates and some have none, or they are not of one authority.
        PeerLostError: somebody could not be reached, or did not come.
    """
    world = transport.world
    acceptor: _Acceptor | None = None
    outgoing: Channels = {}
    try:
        with Listener(find_address(transport.world, transport.gather_json), tls) as listener:
            mine = {"address": listener.address, "port": listener.port, "tls": bool(tls)}
            everybody = transport.gather_json({**mine, "token": secrets.token_hex(16)})
            if len({one["tls"] for one in everybody}) > 1:
                raise MismatchError(
                    world.sign(
                        "some workers have TLS certificates and some have none; give them all, by --job on each host "
                        "under paceline run, or --open for none"
                    )
                )
            token = str(everybody[0]["token"])
            acceptor = _Acceptor(listener, world, token)
            until = time.monotonic() + 0.75 * timeout_s  # less than the deadline of those who are through already
            problem: PacelineError | None = None
            try:
                for rank, one in enumerate(everybody):
                    if rank != world.rank:
                        left = max(0.1, until - time.monotonic())
                        channel = connect(one["address"], one["port"], world.name(rank), left, tls)
                        outgoing[rank] = channel
                        channel.send(HELLO, (world.rank,), note=token, deadline_s=left)
                        transport.sent(channel.bytes_sent)
                acceptor.wait(until, timeout_s)
            except PacelineError as error:
                problem = error
            _conclude(transport, problem)
        for channel in [*outgoing.values(), *acceptor.incoming.values()]:
            channel.stall_s = timeout_s  # as long as the sender takes: a large frame on a slow link is no dead peer
        return outgoing, acceptor.incoming
    except BaseException:
        for channel in [*outgoing.values(), *(acceptor.close() if acceptor is not None else [])]:
            channel.close()
        raise


def _conclude(transport: Transport, problem: PacelineError | None) -> None:
    """Raise on every worker where one of them did not meet all."""
    mismatch = isinstance(problem, MismatchError)
    said = transport.gather_json({"problem": "" if problem is None else str(problem), "mismatch": mismatch})
    if problem is not None:
        raise problem
    for rank, one in enumerate(said):
        if one["problem"]:
            kind = MismatchError if one["mismatch"] else PeerLostError
            name = transport.world.name(rank)
            raise kind(transport.world.sign(f"{name} could not connect to all workers: {one['problem']}"))


class _Acceptor:
    """Lets in who knows the token.

    Args:
        listener: where they knock.
        world: who is expected.
        token: what they have to say.

    Attributes:
        incoming: those who came, by rank.
    """

    def __init__(self, listener: Listener, world: World, token: str) -> None:
        self._listener, self._world, self._token = listener, world, token.encode()
        self.incoming: Channels = {}
        self._changed = threading.Condition()
        self._guests: deque[Channel] = deque()  # that have not said who they are
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="paceline-acceptor", daemon=True).start()

    def wait(self, until: float, timeout_s: float) -> None:
        """Return when all have come."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing(), max(0.0, until - time.monotonic())):
                names = self._world.names(self._missing())
                raise PeerLostError(self._world.sign(f"{names} did not connect within {timeout_s:g} s"))

    def close(self) -> list[Channel]:
        """Let nobody in any more; those who are in."""
        with self._changed:
            self._closed.set()
            return list(self.incoming.values())

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank != self._world.rank and rank not in self.incoming]

    def _watch(self) -> None:
        for channel in self._listener.accept_while(lambda: bool(self._missing()) and not self._closed.is_set()):
            self._let_say(channel)

    def _let_say(self, channel: Channel) -> None:
        """Hear a guest in a thread of its own; of too many, whoever has been silent longest has to go."""
        with self._changed:
            if len(self._guests) >= GUESTS + self._world.size:
                self._guests.popleft().close()
            self._guests.append(channel)
        threading.Thread(target=self._admit, args=(channel,), name="paceline-hello", daemon=True).start()

    def _admit(self, channel: Channel) -> None:
        """Hear who it is, each in a thread of its own: one who says nothing holds up nobody else."""
        limit, channel.limit = channel.limit, 0
        try:
            hello = channel.receive(deadline_s=HELLO_S)
            known = isinstance(hello.note, str) and hmac.compare_digest(hello.note.encode(), self._token)
            if hello.kind == HELLO and known and self._take(hello.numbers[0], channel):
                channel.limit = limit
                return
            why: object = "it does not know the token" if not known else f"rank {hello.numbers[0]} is not expected"
        except (PacelineError, OSError, ValueError) as error:  # whatever a stranger may say, or one who gave up
            why = error
        finally:
            with self._changed, contextlib.suppress(ValueError):
                self._guests.remove(channel)
        channel.close()
        turned_away(channel.peer, why)

    def _take(self, rank: int, channel: Channel) -> bool:
        with self._changed:
            if self._closed.is_set() or rank not in self._missing():
                return False
            channel.peer = self._world.name(rank)
            self.incoming[rank] = channel
            self._changed.notify_all()
            return True
