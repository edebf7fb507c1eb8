# SPDX-License-Identifier: Apache-2.0
"""Does OpenSSL renew the keys of a TLS 1.3 connection before the limit of AES-GCM?

    python benchmarks/tls_keys.py [--records N] [--quick]

Both ends of one connection are in this process, with the settings of paceline's connections. One end sends records of
one byte, and more than 2^24.5 of them (RFC 8446, section 5.5); OpenSSL's message callback counts the KeyUpdate messages
of both ends.

The last line is a JSON object: `records` sent, `limit` of AES-GCM, `key_updates` seen, `openssl`, `cipher` and
`seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import ssl
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.framing import MOST_RECORDS

AT_ONCE = 1000
KEY_UPDATE = (22, 24)
"""A handshake message, and its type."""


def main() -> None:
    """Send, count, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description="Key updates of TLS 1.3 by OpenSSL.")
    parser.add_argument("--records", type=int, default=MOST_RECORDS + 200_000)
    parser.add_argument("--quick", action="store_true", help="20,000 records")
    options = parser.parse_args()
    wanted = 20_000 if options.quick else options.records
    updates = 0

    def seen(connection: Any, direction: str, version: int, content: int, kind: int, data: bytes) -> None:
        nonlocal updates
        updates += (content, kind) == KEY_UPDATE

    with tempfile.TemporaryDirectory() as folder:
        tls = Authority.new().issue(Path(folder) / "worker", "worker")
        contexts = tls.client(), tls.server()
    for context in contexts:
        context._msg_callback = seen  # type: ignore[attr-defined]
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[0].wrap_bio(here, there)
    server = contexts[1].wrap_bio(there, here, server_side=True)
    for _ in range(4):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    began, sent = time.perf_counter(), 0
    while sent < wanted:
        for _ in range(AT_ONCE):
            client.write(b"x")
        sent += AT_ONCE
        arrived = 0
        while arrived < AT_ONCE:
            arrived += len(server.read(AT_ONCE))
    cipher = client.cipher()
    found = {"records": sent, "limit": MOST_RECORDS, "key_updates": updates, "openssl": ssl.OPENSSL_VERSION}
    found |= {"cipher": None if cipher is None else cipher[0], "seconds": round(time.perf_counter() - began, 1)}
    print(f"{sent:,} records in {found['seconds']:g} s with {found['cipher']}: {updates} key updates")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
