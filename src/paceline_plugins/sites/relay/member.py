# SPDX-License-Identifier: Apache-2.0
"""A process at a relay: it can be called there, and calls others.

One connection stands as long as the process; it says that this member is there, and carries no data. It is made anew
when it is lost, under the same name. A thread of its own serves it, so no data and no program hold it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from paceline.communication.sockets.channel import TLS, Channel, Closed, Late, secure
from paceline.communication.sockets.framing import set_options
from paceline.communication.sockets.identity import Identity, handshake_failure, job_refusal
from paceline.core import runtime
from paceline.errors import MismatchError, PacelineError
from paceline_plugins.sites.relay.protocol import BEAT_S, LINE, MEMBER, SILENCE_S, STREAM, line, prelude, read_line

GREET_S = 10.0
"""Seconds in which a relay must accept this member."""
PAUSES_S = (0.1, 0.3, 1.0, 2.0)
"""Before further attempts to connect."""
ASK_AGAIN_S = 0.2
"""Seconds until a member that is not there is called again."""
Adopt = Callable[[socket.socket, str], None]

_members: weakref.WeakSet[RelayMember] = weakref.WeakSet()


class RelayMember:
    """This process's place at a relay.

    Args:
        where: the relay's address and port.
        name: of this process there: see :mod:`~paceline_plugins.sites.relay.protocol`.
        tls: this process's certificate.
        adopt: gets a connection from another member, on which TLS has not begun, and the other's address.
        timeout_s: seconds in which the relay must be reached at first.

    Raises:
        Late: the relay cannot be reached.
        MismatchError: it refuses this process.
    """

    def __init__(self, where: tuple[str, int], name: str, tls: TLS, adopt: Adopt, timeout_s: float) -> None:
        self.where, self.name, self._tls, self._adopt = where, name, tls, adopt
        self.site = ""  # this process's, as the relay sees it
        self._life = runtime.token_hex(8)
        self._context = tls.client()
        self._serials = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ringing: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._sock: socket.socket | None = None
        self._refusal: MismatchError | None = None
        self._problem = "it has not answered yet"
        self._there = threading.Event()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="paceline-relayed", daemon=True)
        _members.add(self)
        self._thread.start()
        arrived = self._there.wait(timeout_s)
        if self._refusal is not None or not arrived:
            self.close()
            raise self._refusal or Late(f"{self} cannot be reached within {timeout_s:g} s: {self._problem}")

    def __str__(self) -> str:
        return f"the relay at {self.where[0]}, port {self.where[1]}"

    def connect(self, name: str, peer: str, timeout_s: float) -> Channel:
        """A channel to another member, with TLS from end to end.

        Args:
            name: of the other member.
            peer: its name, for messages.
            timeout_s: deadline; a member that is not there yet is called again until then.

        Raises:
            Late: it did not answer in time.
            Closed: the relay or the other end closed the connection.
            MismatchError: the other end has a wrong certificate, or rejects this one's.
        """
        deadline = time.monotonic() + timeout_s
        if self._closed:
            raise Closed(f"the connection to {self} is closed")
        future = asyncio.run_coroutine_threadsafe(self._reach(name, deadline), self._loop)
        try:
            sock = future.result(timeout_s + 1.0)
        except (asyncio.CancelledError, asyncio.TimeoutError) as error:
            future.cancel()
            raise Late(f"{peer} did not answer through {self} within {timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            raise Closed(f"the connection to {peer} through {self} is lost: {error}") from error
        return secure(sock, f"{peer}, through {self}", peer, deadline, self._tls)

    def close(self) -> None:
        """Leave the relay; streams that have begun stay."""
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
        if threading.current_thread() is not self._thread:
            self._thread.join(GREET_S)

    def forget(self) -> None:
        """In a forked child: drop the connection, which is the parent's."""
        self._closed = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                os.close(self._sock.fileno())

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._stay())
        finally:
            self._there.set()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            with contextlib.suppress(RuntimeError):
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
                self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _stay(self) -> None:
        """Keep the connection until this is closed, or refused for good."""
        lost = 0
        while not self._closed:
            began = time.monotonic()
            try:
                await self._converse()
            except MismatchError as error:
                self._problem = str(error)
                if not self._there.is_set():
                    self._refusal = error
                    return
            except (OSError, EOFError, PacelineError, asyncio.TimeoutError) as error:
                self._problem = str(error) or "it was silent"
            finally:
                self._drop()
            lost = 0 if time.monotonic() - began > SILENCE_S else lost + 1
            await asyncio.sleep(PAUSES_S[min(lost, len(PAUSES_S) - 1)])

    def _drop(self) -> None:
        writer, self._writer, self._sock = self._writer, None, None
        if writer is not None:
            writer.transport.abort()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"the connection to {self} was lost: {self._problem}"))

    async def _open(self, first: bytes) -> socket.socket:
        """A connection to the relay that has said its prelude."""
        found = await self._loop.getaddrinfo(*self.where, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            set_options(sock)
            await self._loop.sock_connect(sock, where)
            await self._loop.sock_sendall(sock, first)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _converse(self) -> None:
        """Say who this is, and answer calls until the connection ends."""
        reader, writer = await asyncio.wait_for(self._greet(), GREET_S)
        self._writer = writer
        writer.write(line(name=self.name, life=self._life))
        said = await read_line(reader, GREET_S)
        if "refused" in said:
            raise MismatchError(f"{self} refuses this process: {str(said['refused'])[:500]}")
        self.site = str(said.get("site", ""))[:64]
        self._there.set()
        beats = self._loop.create_task(self._beat(writer))
        try:
            while True:
                self._received(await read_line(reader, SILENCE_S))
        finally:
            beats.cancel()

    async def _greet(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._sock = sock = await self._open(prelude(MEMBER))
        try:
            reader, writer = await asyncio.open_connection(sock=sock, ssl=self._context, server_hostname="", limit=LINE)
        except ssl.SSLError as error:
            raise MismatchError(f"no TLS with {self}: {handshake_failure(error, self._tls.certificate)}") from error
        problem = job_refusal(self._tls.identity, Identity.read(writer.get_extra_info("peercert") or {}))
        if problem:
            writer.transport.abort()
            raise MismatchError(f"no TLS with {self}: {problem}")
        return reader, writer

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            writer.write(line(beat=1))

    def _received(self, said: dict[str, Any]) -> None:
        if "ring" in said:
            task = self._loop.create_task(self._answer(str(said["ring"]), str(said.get("from", "the relay"))[:64]))
            self._ringing.add(task)
            task.add_done_callback(self._ringing.discard)
            return
        serial = said.get("serial")
        answer = self._answers.pop(serial, None) if isinstance(serial, int) else None
        if answer is not None and not answer.done():
            answer.set_result(said)

    # -- streams ----------------------------------------------------------------------------------

    async def _answer(self, ticket: str, caller: str) -> None:
        """A member calls."""
        with contextlib.suppress(OSError, ValueError):  # the caller notices, and calls again
            self._adopt(await self._open(prelude(STREAM, bytes.fromhex(ticket))), caller)

    async def _reach(self, name: str, deadline: float) -> socket.socket:
        """A stream to the member of that name."""
        why = f"{self} cannot be reached: {self._problem}"
        while (left := deadline - time.monotonic()) > 0:
            said: dict[str, Any] = {"absent": why}
            if self._writer is not None:
                with contextlib.suppress(ConnectionError):
                    said = await asyncio.wait_for(self._ask(name), left)
            if "ticket" in said:
                first = prelude(STREAM, bytes.fromhex(str(said["ticket"])))
                return await asyncio.wait_for(self._open(first), max(0.01, deadline - time.monotonic()))
            why = str(said.get("absent", ""))[:300]
            await asyncio.sleep(min(ASK_AGAIN_S, left))
        raise Late(f"no connection through {self}: {why}")

    async def _ask(self, name: str) -> dict[str, Any]:
        serial = next(self._serials)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[serial] = answer
        assert self._writer is not None
        self._writer.write(line(call=name, serial=serial))
        try:
            return await answer
        finally:
            self._answers.pop(serial, None)


def _after_fork() -> None:
    for member in list(_members):
        member.forget()


os.register_at_fork(after_in_child=_after_fork)
