# SPDX-License-Identifier: Apache-2.0
"""Receives many records of TLS in one go: a call of OpenSSL's gives one record, at most 16 KiB.

100 MB are 6,400 of these calls, so there is no lock and no bookkeeping between two of them. A call that sends makes as
many records as it needs.
"""

from __future__ import annotations

import ssl

AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a socket call that would block."""


def receive_records(sock: ssl.SSLSocket, view: memoryview) -> int:
    """Copy what has arrived to the beginning of `view`; returns the number of bytes, 0 at the end of the connection.

    Raises:
        One of `AGAIN`: nothing has arrived.
    """
    got = 0
    try:
        while got < view.nbytes and (more := sock.recv_into(view[got:])):
            got += more
    except AGAIN:
        if not got:
            raise
    return got
