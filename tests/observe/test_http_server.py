# SPDX-License-Identifier: Apache-2.0
"""The page of numbers is there for a scraper whatever other clients do, and they hold no thread for ever."""

from __future__ import annotations

import socket
import threading
import urllib.request

import pytest

from paceline.core.world import World
from paceline.observe import http_server
from paceline.observe.http_server import MAX_CONNECTIONS
from paceline.observe.sinks.metrics import Metrics


def connect(page: Metrics) -> socket.socket:
    host, _, port = page.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def serving() -> int:
    """Threads that serve a client."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_many_clients_that_say_nothing_keep_no_scraper_out() -> None:
    page = Metrics("127.0.0.1:0", World)
    try:
        silent = [connect(page) for _ in range(MAX_CONNECTIONS + 8)]
        with urllib.request.urlopen(f"http://{page.address}/metrics", timeout=30) as answer:
            assert answer.status == 200
        assert silent[0].recv(1) == b"", "the oldest had to go"
        assert serving() <= MAX_CONNECTIONS + 1  # one may be on its way out
        for client in silent:
            client.close()
    finally:
        page.close()


def test_a_request_that_comes_a_byte_at_a_time_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.5)
    page = Metrics("127.0.0.1:0", World)
    try:
        with connect(page) as slow:
            cut = threading.Event()

            def send() -> None:
                try:
                    while not cut.wait(0.05):
                        slow.send(b"G")
                except OSError:
                    return

            thread = threading.Thread(target=send)
            thread.start()
            try:
                assert slow.recv(1) == b""  # times out after 30 s
            except ConnectionResetError:
                pass
            finally:
                cut.set()
                thread.join()
    finally:
        page.close()
