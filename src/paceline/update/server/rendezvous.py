# SPDX-License-Identifier: Apache-2.0
"""How the workers of a job connect: each listens, and connects to each other worker.

The transport that the workers have already carries the addresses, the ports and a token that was drawn for this job. A
new connection has to send the token first, or it is rejected. At the end all workers exchange whether they are
connected to all, so that either all begin or none does.
"""

from __future__ import annotations

import contextlib
import hmac
from collections import deque
from collections.abc import Sequence

from paceline.communication import Transport
from paceline.communication.sockets.channel import TLS, Channel, Listener, connect, listen
from paceline.communication.sockets.identity import rank_role, refusal
from paceline.communication.sockets.rejected import turned_away
from paceline.communication.torch.rendezvous import find_address
from paceline.core import runtime
from paceline.core.world import World
from paceline.errors import MismatchError, PacelineError, PeerLostError
from paceline.update.server.protocol import FrameKind

HELLO = FrameKind.HELLO
"""The first frame of a connection: (rank), and the token as its note."""
HELLO_S = 5.0
"""Seconds within which a new connection must send its hello."""
PENDING = 256
"""Most connections without a hello, besides one for each worker."""

Channels = dict[int, Channel]


def connect_all(transport: Transport, timeout_s: float, tls: TLS | None) -> tuple[Channels, Channels]:
    """Connections to every other worker, by rank, and those that they made to this one.

    Raises:
        MismatchError: some workers have certificates and some have none, or they are not of one authority.
        PeerLostError: a worker could not be reached, or did not connect.
    """
    world = transport.world
    acceptor: _Acceptor | None = None
    outgoing: Channels = {}
    try:
        with listen(find_address(transport.world, transport.gather_json), tls) as listener:
            mine = {"address": listener.address, "port": listener.port, "tls": bool(tls)}
            offers = transport.gather_json({**mine, "token": runtime.token_hex(16)})
            if len({one["tls"] for one in offers}) > 1:
                raise MismatchError(
                    world.sign(
                        "some workers have TLS certificates and some have none; give them all, by --job on each host "
                        "under paceline run, or --open for none"
                    )
                )
            token = str(offers[0]["token"])
            ranks: Sequence[int] = getattr(transport, "global_ranks", range(world.size))
            acceptor = _Acceptor(listener, world, token, ranks)
            # less than the deadline of workers that are connected already
            until = runtime.monotonic() + 0.75 * timeout_s
            problem: PacelineError | None = None
            try:
                for rank, one in enumerate(offers):
                    if rank != world.rank:
                        left = max(0.1, until - runtime.monotonic())
                        channel = connect(one["address"], one["port"], world.name(rank), left, tls)
                        outgoing[rank] = channel
                        impostor = refusal(channel.identity, rank_role(ranks[rank]), world.name(rank))
                        if impostor:
                            raise MismatchError(world.sign(impostor))
                        channel.send(HELLO, (world.rank,), note=token, deadline_s=left)
                        transport.sent(channel.bytes_sent)
                acceptor.wait(until, timeout_s)
            except PacelineError as error:
                problem = error
            _agree(transport, problem)
        for channel in [*outgoing.values(), *acceptor.incoming.values()]:
            channel.adjust(stall_s=timeout_s)  # a large frame on a slow link takes long, and its sender lives
        return outgoing, acceptor.incoming
    except BaseException:
        for channel in [*outgoing.values(), *(acceptor.close() if acceptor is not None else [])]:
            channel.close()
        raise


def _agree(transport: Transport, problem: PacelineError | None) -> None:
    """Raise on every worker where one of them has a problem."""
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
    """Accepts the connections of the other workers, which know the token."""

    def __init__(self, listener: Listener, world: World, token: str, ranks: Sequence[int] = ()) -> None:
        self._listener, self._world, self._token = listener, world, token.encode()
        self._ranks = ranks or range(world.size)
        self.incoming: Channels = {}  # the accepted connections, by rank
        self._changed = runtime.Condition()
        self._pending: deque[Channel] = deque()  # connections without a hello
        self._closed = runtime.Event()
        runtime.thread(self._watch, "paceline-acceptor").start()

    def wait(self, until: float, timeout_s: float) -> None:
        """Wait until all workers have connected."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing(), max(0.0, until - runtime.monotonic())):
                names = self._world.names(self._missing())
                raise PeerLostError(self._world.sign(f"{names} did not connect within {timeout_s:g} s"))

    def close(self) -> list[Channel]:
        """Accept no more connections; the accepted ones."""
        with self._changed:
            self._closed.set()
            return list(self.incoming.values())

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank != self._world.rank and rank not in self.incoming]

    def _watch(self) -> None:
        for channel in self._listener.accept_while(lambda: bool(self._missing()) and not self._closed.is_set()):
            with self._changed:
                if len(self._pending) >= PENDING + self._world.size:
                    self._pending.popleft().close()
                self._pending.append(channel)
            runtime.thread(self._admit, "paceline-hello", (channel,)).start()

    def _admit(self, channel: Channel) -> None:
        """Receive the hello of a connection, in its own thread."""
        limit = channel.limit
        channel.adjust(limit=0)
        try:
            hello = channel.receive(deadline_s=HELLO_S)
            rank = hello.numbers[0]
            known = isinstance(hello.note, str) and hmac.compare_digest(hello.note.encode(), self._token)
            role = rank_role(self._ranks[rank]) if 0 <= rank < self._world.size else ""
            impostor = refusal(channel.identity, role, self._world.name(rank)) if known and role else ""
            if hello.kind == HELLO and known and not impostor and self._take(rank, channel):
                channel.adjust(limit=limit)
                return
            why: object = impostor or f"rank {rank} is not expected" if known else "it does not know the token"
        except (PacelineError, OSError, ValueError) as error:  # of a stranger, or of a worker that has failed
            why = error
        finally:
            with self._changed, contextlib.suppress(ValueError):
                self._pending.remove(channel)
        channel.close()
        turned_away(channel.peer, why)

    def _take(self, rank: int, channel: Channel) -> bool:
        with self._changed:
            if self._closed.is_set() or rank not in self._missing():
                return False
            channel.adjust(peer=self._world.name(rank))
            self.incoming[rank] = channel
            self._changed.notify_all()
            return True
