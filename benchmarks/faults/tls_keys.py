# SPDX-License-Identifier: Apache-2.0
"""Is the key of a TLS 1.3 connection renewed before AES-GCM's limit, at the rate of the connection?

    python benchmarks/faults/tls_keys.py [--records N] [--limit N] [--quick]

Two threads of this process have the two ends of one of paceline's connections over loopback. One sends 256 KiB at a
time, 16 records of TLS, and more than 2^24.5 records in all (RFC 8446, section 5.5), which are 392 GB. OpenSSL's
message callback counts the KeyUpdate messages that leave it.

The last line is a JSON object: `records` sent, `limit` of AES-GCM, `most_with_one_key`, `key_updates` seen, `gb_per_s`,
`openssl`, `cipher` and `seconds`.
"""

from __future__ import annotations

import argparse
import json
import ssl
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from paceline.communication.sockets import framing
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.channel import TLS, Listener, connect

RECORDS = 16
BODY = torch.zeros(RECORDS << 14, dtype=torch.uint8)
KEY_UPDATE = (22, 24)
"""A handshake message, and its type."""
DEADLINE_S = 60.0


def counted(updates: list[str]) -> None:
    """From now on every connecting end notes its KeyUpdate messages."""
    plain = TLS.client

    def seen(connection: Any, direction: str, version: int, content: int, kind: int, data: bytes) -> None:
        if (content, kind) == KEY_UPDATE:
            updates.append(direction)

    def client(self: TLS) -> ssl.SSLContext:
        context = plain(self)
        context._msg_callback = seen  # type: ignore[attr-defined]
        return context

    TLS.client = client  # type: ignore[method-assign]


def main() -> None:
    """Send, count, and print JSON on the last line."""
    parser = argparse.ArgumentParser(description="Key updates of TLS 1.3.")
    parser.add_argument("--records", type=int, default=framing.MOST_RECORDS + 200_000)
    parser.add_argument("--limit", type=int, default=framing.MOST_RECORDS)
    parser.add_argument("--quick", action="store_true", help="20,000 records, and a limit of 4,000")
    options = parser.parse_args()
    wanted, framing.MOST_RECORDS = (20_000, 4000) if options.quick else (options.records, options.limit)
    updates: list[str] = []
    counted(updates)
    with tempfile.TemporaryDirectory() as folder:
        tls = Authority.new().issue(Path(folder) / "worker", "worker")
        with Listener("127.0.0.1", tls) as listener:
            ends = []
            opening = threading.Thread(target=lambda: ends.append(listener.accept(DEADLINE_S)))
            opening.start()
            near = connect("127.0.0.1", listener.port, "the other end", DEADLINE_S, tls)
            opening.join()
    far, frames = ends[0], -(-wanted // RECORDS)
    there = torch.empty_like(BODY)

    def take() -> None:
        for _ in range(frames):
            far.receive(there, DEADLINE_S)

    taking = threading.Thread(target=take)
    began, most = time.perf_counter(), 0
    taking.start()
    for _ in range(frames):
        near.send(1, body=BODY, deadline_s=DEADLINE_S)
        most = max(most, near.records_sent)
    taking.join()
    seconds = time.perf_counter() - began
    cipher = near._sock.cipher()  # type: ignore[attr-defined]
    found = {"records": frames * RECORDS, "limit": framing.MOST_RECORDS, "most_with_one_key": most}
    found |= {"key_updates": updates.count("write"), "gb_per_s": round(frames * BODY.numel() / seconds / 1e9, 2)}
    found |= {"openssl": ssl.OPENSSL_VERSION, "cipher": cipher and cipher[0], "seconds": round(seconds, 1)}
    print(f"{found['records']:,} records in {seconds:.1f} s with {found['cipher']}: {found['key_updates']} key updates")
    print(json.dumps(found))
    near.close()
    far.close()
    if not updates:
        raise SystemExit("no key was renewed")


if __name__ == "__main__":
    main()
