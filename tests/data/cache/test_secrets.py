# SPDX-License-Identifier: Apache-2.0
"""A user's headers for one server reach no other server and no message; links in a cache are not followed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.checkpoint.urls import redacted
from paceline_plugins.data.cache import Cache, CacheError, NotServedError
from paceline_plugins.data.cache.http_backend import _may_share_headers
from paceline_plugins.data.cache.locks import FileLock

GIVEN = {"Authorization": "Bearer hush", "Cookie": "id=hush", "X-Api-Key": "hush"}
Requests = dict[str, dict[str, str]]


@contextmanager
def web(answer: Callable[[str], tuple[int, str]]) -> Iterator[tuple[str, Requests]]:
    """A server that answers a path with a code and a location; its address, and the headers of each request."""
    requests: Requests = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests[self.path] = {name.lower(): value for name, value in self.headers.items()}
            code, location = answer(self.path)
            self.send_response(code)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "2" if code == 200 else "0")
            self.end_headers()
            self.wfile.write(b"ok" if code == 200 else b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_headers_do_not_follow_a_redirect_to_another_server(stack: ExitStack, tmp_path: Path, code: int) -> None:
    there, other_requests = stack.enter_context(web(lambda path: (200, "")))
    here, requests = stack.enter_context(
        web(lambda path: (code, "/next" if path == "/a" else f"{there}/b?sig=its-own"))
    )
    with Cache(tmp_path, options={"headers": GIVEN}) as cache:
        assert cache.read(f"{here}/a") == b"ok"
    for path in ("/a", "/next"):  # the same server may know them
        assert {name: requests[path].get(name.lower()) for name in GIVEN} == GIVEN
    assert not {name.lower() for name in GIVEN} & set(other_requests["/b?sig=its-own"])


def test_a_refusal_after_a_redirect_names_the_server_and_no_secret(stack: ExitStack, tmp_path: Path) -> None:
    there, _ = stack.enter_context(web(lambda path: (403, "")))
    here, requests = stack.enter_context(web(lambda path: (302, f"{there}/b?X-Amz-Signature=hush")))
    url = f"{here}/a?token=hush".replace("//", "//user:hush@")
    with Cache(tmp_path) as cache, pytest.raises(NotServedError) as caught:
        cache.read(url)
    assert requests["/a?token=hush"]["authorization"] == "Basic dXNlcjpodXNo"
    assert f"redirected to {there}/b, where the headers given for {here} are not sent" in str(caught.value)
    assert "hush" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        ("https://a/x", "https://a:443/y", True),
        ("http://a/x", "https://a/x", True),
        ("https://a/x", "http://a/x", False),
        ("http://a:8080/x", "https://a/x", False),
        ("https://a/x", "https://a:8443/x", False),
        ("https://a/x", "https://b.a/x", False),
        ("https://A./x", "https://a/x", True),
        ("https://a/x", "https://a:bad/x", False),
    ],
)
def test_which_servers_share_headers(one: str, other: str, may: bool) -> None:
    assert _may_share_headers(one, other) == may


@pytest.mark.parametrize(
    "text",
    [
        "GET https://bucket.host/key?X-Amz-Credential=hush&X-Amz-Signature=hush failed",
        "URL can't contain control characters. '/a b?sig=hush&se=hush hush' (found at least ' ')",
        "nonnumeric port: 'https://user:hush@host/'",
        "sftp://me:hu@sh@host:22/x: connection refused",
        "headers={'Authorization': 'Bearer hush', 'X-Amz-Security-Token': 'hush'}",
        "403: Authorization: Basic hush",
        "account_key=hush; secret_access_key: hush",
    ],
)
def test_messages_of_libraries_lose_their_secrets(text: str) -> None:
    assert "hush" not in redacted(text) and "hu@" not in redacted(text)


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_lock_is_not_followed(tmp_path: Path, kind: str) -> None:
    theirs, lock = tmp_path / "theirs", tmp_path / "a.lock"
    theirs.write_text("precious")
    {
        "link": lambda: lock.symlink_to(theirs),
        "second name": lambda: os.link(theirs, lock),
        "pipe": lambda: os.mkfifo(lock),
    }[kind]()
    with pytest.raises(CacheError, match=r"a\.lock is a link or no file"):
        FileLock(lock).try_acquire(shared=False)
    assert theirs.read_text() == "precious"


@pytest.mark.parametrize("ending", ["lock", "part", "json"])
def test_a_link_that_another_user_placed_in_a_cache_is_never_written_through(
    stack: ExitStack, tmp_path: Path, ending: str
) -> None:
    here, _ = stack.enter_context(web(lambda path: (200, "")))
    url, theirs = f"{here}/a", tmp_path / "theirs"
    theirs.write_text("precious")
    with Cache(tmp_path / "cache", retries=0) as cache:
        directory = cache._directory
        link = {"lock": directory.lock(url).path, "part": directory.part(url), "json": directory._meta(url)}[ending]
        link.symlink_to(theirs)
        with contextlib.suppress(CacheError):  # a lock is refused, leftovers are removed first
            cache.read(url)
    assert theirs.read_text() == "precious"


def test_stripped_headers_do_not_return_with_a_second_redirect(stack: ExitStack, tmp_path: Path) -> None:
    address: list[str] = []
    there, _ = stack.enter_context(web(lambda path: (302, f"{address[0]}/end")))
    here, requests = stack.enter_context(web(lambda path: (200, "") if path == "/end" else (302, f"{there}/x")))
    address.append(here)
    with Cache(tmp_path, options={"headers": GIVEN}) as cache:
        assert cache.read(f"{here}/a") == b"ok"
    assert "authorization" not in requests["/end"]
