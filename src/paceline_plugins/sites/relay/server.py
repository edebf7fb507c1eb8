# SPDX-License-Identifier: Apache-2.0
"""The relay: members keep a connection to it, and it joins the two ends of a stream that one of them asks for.

One thread serves all connections. A stream is passed on as it comes, and read only as fast as its other end takes it,
so that it needs no memory of its own. A connection without a valid prelude, ticket or certificate is closed after
`GREET_S`; at most `STRANGERS` of them are under way, and a further one replaces the oldest of the address with the
most.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import secrets
import socket
import ssl
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.communication.sockets.framing import set_options
from paceline.communication.sockets.identity import Identity, handshake_failure, job_refusal
from paceline.communication.sockets.rejected import neighbourhood, turned_away
from paceline.communication.sockets.tls import TLS
from paceline.errors import PacelineError, UnsupportedError
from paceline_plugins.sites.relay.enrolment import Registrar
from paceline_plugins.sites.relay.protocol import (
    BUSY,
    ENROL,
    LINE,
    MEMBER,
    PRELUDE_BYTES,
    SILENCE_S,
    TICKET_BYTES,
    line,
    name_refusal,
    read_exactly,
    read_line,
    read_prelude,
    site_of,
)

GREET_S = 5.0
"""Seconds in which a connection must say what it is for, with a handshake where one is needed."""
STRANGERS = 64
"""Most connections that have not said it yet."""
TICKET_S = 15.0
"""Seconds in which both ends of a stream must come with their tickets."""
MOST_MEMBERS, MOST_CALLS, MOST_STREAMS = 4096, 256, 16384
"""Members; streams that one of them has asked for and that have not begun; streams in all."""
CHUNK = 1 << 17
"""Bytes of a stream that are held at a time, in each direction."""
UNREAD = 1 << 20
"""Bytes that a member may leave unread before it is given up."""


@dataclass(eq=False)
class Member:
    """A member's connection."""

    name: str
    life: str
    peer: str
    writer: asyncio.StreamWriter
    calls: set[Call] = field(default_factory=set)

    def say(self, **said: Any) -> None:
        """Send a line; who does not read is given up."""
        if self.writer.transport.get_write_buffer_size() > UNREAD:
            self.writer.transport.abort()
        else:
            self.writer.write(line(**said))


@dataclass(eq=False)
class Call:
    """A stream whose ends have not both come yet."""

    caller: Member
    tickets: tuple[bytes, bytes]
    first: socket.socket | None = None


class RelayServer:
    """A relay at one address.

    Args:
        address: the only address at which it listens.
        port: 0 for any that is free.
        tls: of the job: members show certificates of the same authority.
        registrar: makes certificates for hosts with an invitation; None: they are refused.

    Raises:
        UnsupportedError: it cannot listen there.
    """

    def __init__(self, address: str, port: int, tls: TLS, registrar: Registrar | None = None) -> None:
        self._tls, self._context, self._registrar = tls, tls.server(), registrar
        try:
            family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(str(where[0]).split("%")[0]).is_unspecified:
                raise UnsupportedError(f"a relay takes one address of this host, got {address!r}: name the address")
            self._sock = socket.create_server((str(where[0]), port), family=family, backlog=256)
        except OSError as error:
            raise UnsupportedError(f"a relay cannot listen at {address}, port {port}: {error}") from error
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]  # where it listens
        self._members: dict[str, Member] = {}
        self._tickets: dict[bytes, Call] = {}
        self._streams = 0
        self._greeting: dict[asyncio.Task[bool], str] = {}
        self._tasks: set[asyncio.Task[bool]] = set()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-relay", daemon=True)

    def start(self) -> None:
        """Serve, in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        else:
            self._loop.close()
        self._sock.close()

    def __enter__(self) -> RelayServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        accepting = self._loop.create_task(self._accept())
        await self._over.wait()
        everything = [accepting, *self._tasks]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
        for call in set(self._tickets.values()):
            self._expire(call)
        await asyncio.sleep(0)  # closed transports end

    async def _accept(self) -> None:
        while True:
            try:
                sock, where = await self._loop.sock_accept(self._sock)
            except OSError:  # too many open files, for instance
                await asyncio.sleep(0.1)
                continue
            set_options(sock)
            if len(self._greeting) >= STRANGERS:
                self._oldest_of_busiest().cancel()
            task = self._loop.create_task(self._serve_one(sock, str(where[0]), f"{where[0]}:{where[1]}"))
            self._greeting[task] = neighbourhood(str(where[0]))
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._forget, sock))

    def _oldest_of_busiest(self) -> asyncio.Task[bool]:
        most = Counter(self._greeting.values()).most_common(1)[0][0]
        found = next(task for task, place in self._greeting.items() if place == most)
        del self._greeting[found]
        return found

    def _forget(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        """A connection has been served, or was given up before."""
        self._greeting.pop(task, None)
        self._tasks.discard(task)
        if task.cancelled() or not task.result():
            sock.close()

    def _greeted(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._greeting.pop(task, None)

    async def _serve_one(self, sock: socket.socket, address: str, peer: str) -> bool:
        """Serve a connection until it ends; what is wrong with it ends it alone.

        Returns:
            Whether it stays open, as the first end of a stream.
        """
        try:
            kind, ticket = read_prelude(await asyncio.wait_for(read_exactly(sock, PRELUDE_BYTES), GREET_S))
            if kind == MEMBER:
                await self._serve_member(sock.dup(), address, peer)
            elif kind == ENROL:
                await asyncio.wait_for(self._enrol(sock, ticket), GREET_S)
            else:
                return await self._join_stream(sock, ticket)
        except asyncio.TimeoutError:
            turned_away(peer, f"it was silent for too long at the relay (limit: {GREET_S:g} s)")
        except ssl.SSLError as error:
            turned_away(peer, handshake_failure(error, self._tls.certificate))
        except ConnectionError as error:
            turned_away(peer, error, expected=True)  # also a launcher that looks whether the relay is there
        except Exception as error:  # invalid input must end its own connection only
            turned_away(peer, error)
        except asyncio.CancelledError:
            turned_away(peer, "the relay is closed, or too many connections have not said what they are for")
            raise
        return False

    # -- members ----------------------------------------------------------------------------------

    async def _serve_member(self, sock: socket.socket, address: str, peer: str) -> None:
        reader = asyncio.StreamReader(LINE, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=GREET_S
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            identity = Identity.read(transport.get_extra_info("peercert") or {})
            said = await read_line(reader, GREET_S)
            member = Member(str(said.get("name")), str(said.get("life"))[:64], peer, writer)
            why = job_refusal(self._tls.identity, identity) or name_refusal(said.get("name"), identity)
            why = why or self._taken(member)
            if why:
                member.say(refused=why)
                turned_away(peer, why)
                return
            self._greeted()
            await self._converse(member, reader, site_of(address))
        finally:
            if self._over.is_set():
                transport.abort()
            else:  # after the last line
                transport.close()

    def _taken(self, member: Member) -> str:
        """Why this name is not free; empty if it is, or if its owner comes back."""
        other = self._members.get(member.name)
        if other is not None and other.life != member.life:
            return f"another {member.name} is here, from {other.peer}: {BUSY}"
        return "" if len(self._members) < MOST_MEMBERS else f"the relay has {MOST_MEMBERS} members, and takes no more"

    async def _converse(self, member: Member, reader: asyncio.StreamReader, site: str) -> None:
        before = self._members.get(member.name)
        if before is not None:  # its connection was lost, and this end does not know it yet
            before.writer.transport.abort()
        self._members[member.name] = member
        member.say(welcome=member.name, site=site)
        try:
            while True:
                said = await read_line(reader, SILENCE_S)
                if "call" in said:
                    self._call(member, said["call"], said.get("serial"))
                else:
                    member.say(beat=1)
        except asyncio.TimeoutError:
            raise ConnectionError(f"{member.name} was silent for {SILENCE_S:g} s") from None
        finally:
            if self._members.get(member.name) is member:
                del self._members[member.name]

    # -- streams ----------------------------------------------------------------------------------

    def _call(self, caller: Member, name: object, serial: object) -> None:
        """Give tickets to both ends of a stream."""
        called = self._members.get(name) if isinstance(name, str) else None
        if called is None:
            caller.say(serial=serial, absent=f"{name!s:.128} is not at the relay")
        elif len(caller.calls) >= MOST_CALLS or self._streams >= MOST_STREAMS:
            caller.say(serial=serial, absent=f"the relay is full: {len(caller.calls)} calls, {self._streams} streams")
        else:
            call = Call(caller, (secrets.token_bytes(TICKET_BYTES), secrets.token_bytes(TICKET_BYTES)))
            caller.calls.add(call)
            self._tickets.update(dict.fromkeys(call.tickets, call))
            self._loop.call_later(TICKET_S, self._expire, call)
            caller.say(serial=serial, ticket=call.tickets[0].hex())
            called.say(ring=call.tickets[1].hex(), **{"from": caller.peer})

    def _expire(self, call: Call) -> None:
        """It has not begun in time."""
        call.caller.calls.discard(call)
        for ticket in call.tickets:
            self._tickets.pop(ticket, None)
        if call.first is not None:
            call.first.close()
            call.first = None

    async def _join_stream(self, sock: socket.socket, ticket: bytes) -> bool:
        """Pass the stream on, if the other end is here; else wait for it, and return True."""
        call = self._tickets.pop(ticket, None)
        if call is None:
            raise PacelineError("its ticket was not given out here, is used, or is too old")
        if call.first is None:
            call.first = sock  # until the other one comes, or `_expire`
            return True
        other, call.first = call.first, None
        self._expire(call)
        self._greeted()
        self._streams += 1
        try:
            await self._splice(other, sock)
        finally:
            self._streams -= 1
            other.close()
        return False

    async def _splice(self, one: socket.socket, other: socket.socket) -> None:
        """Pass on what comes, until both ends have said all."""
        pumps = [self._loop.create_task(self._pump(*ends)) for ends in ((one, other), (other, one))]
        try:
            with contextlib.suppress(OSError):  # an end is lost: the other one sees the connection closed
                await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: socket.socket, target: socket.socket) -> None:
        while data := await self._loop.sock_recv(source, CHUNK):
            await self._loop.sock_sendall(target, data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    async def _enrol(self, sock: socket.socket, key_name: bytes) -> None:
        if self._registrar is None:
            raise PacelineError("it has an invitation, and this relay makes no certificates")
        receive = functools.partial(read_exactly, sock)
        await self._registrar.serve(key_name, receive, functools.partial(self._loop.sock_sendall, sock))
