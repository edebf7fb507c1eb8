# SPDX-License-Identifier: Apache-2.0
"""The body of an answer over HTTP without TLS, from the socket in pieces of 1 MB.

The kernel fills a piece before it wakes the thread. So a piece takes one wake-up, one wait for Python's lock and one
copy, where `http.client` and a client with threads of its own take several for each quarter of it.
"""

from __future__ import annotations

import http.client
import socket
import struct
import time
from collections.abc import Iterator

PIECE_BYTES = 1 << 20
TICK_S = 1.0
"""After which a piece is handed on that is not full: on a slow link progress stays visible."""


def has_plain_body(answer: http.client.HTTPResponse) -> bool:
    """Whether the rest of an answer is its body as it is: of a known size, not in chunks, not encrypted."""
    return answer.url.startswith("http://") and not answer.chunked and answer.length is not None


def plain_body(answer: http.client.HTTPResponse, timeout_s: float) -> Iterator[bytes]:
    """Pieces of the body; they end early where the server closes the connection.

    Raises:
        TimeoutError: nothing came for `timeout_s`.
        OSError: the connection broke.
    """
    left = answer.length or 0
    if left and (first := answer.read(min(left, len(answer.peek())))):  # came with the headers
        left -= len(first)
        yield first
    if not left:
        return
    with socket.socket(fileno=socket.dup(answer.fileno())) as connection:
        connection.settimeout(None)  # the kernel's own timeout, below, leaves MSG_WAITALL its meaning
        tick = struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        since = time.monotonic()
        while left:
            try:
                piece = connection.recv(min(left, PIECE_BYTES), socket.MSG_WAITALL)
            except BlockingIOError:
                if time.monotonic() - since > timeout_s:
                    raise TimeoutError(f"nothing came for {timeout_s:g} s") from None
                continue
            if not piece:
                return
            since, left = time.monotonic(), left - len(piece)
            yield piece
