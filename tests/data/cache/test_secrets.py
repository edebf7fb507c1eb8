# SPDX-License-Identifier: Apache-2.0
"""What a user gives for one server reaches no other, and no message; links in a cache are not followed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.data.cache import Cache, CacheError, NotServedError
from paceline.data.cache.http_backend import _may_share_headers
from paceline.data.cache.locks import FileLock
from paceline.data.cache.urls import redacted

GIVEN = {"Authorization": "Bearer hush", "Cookie": "id=hush", "X-Api-Key": "hush"}
Heard = dict[str, dict[str, str]]


@contextmanager
def web(answer: Callable[[str], tuple[int, str]]) -> Iterator[tuple[str, Heard]]:
    """A server that answers a path with a code and a place; its address, and the headers that came with each path."""
    heard: Heard = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard[self.path] = {name.lower(): value for name, value in self.headers.items()}
            code, place = answer(self.path)
            self.send_response(code)
            if place:
                self.send_header("Location", place)
            self.send_header("Content-Length", "2" if code == 200 else "0")
            self.end_headers()
            self.wfile.write(b"ok" if code == 200 else b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", heard
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
    there, heard_there = stack.enter_context(web(lambda path: (200, "")))
    here, heard = stack.enter_context(web(lambda path: (code, "/next" if path == "/a" else f"{there}/b?sig=its-own")))
    with Cache(tmp_path, options={"headers": GIVEN}) as cache:
        assert cache.read(f"{here}/a") == b"ok"
    for path in ("/a", "/next"):  # the same server may know them
        assert {name: heard[path].get(name.lower()) for name in GIVEN} == GIVEN
    assert not {name.lower() for name in GIVEN} & set(heard_there["/b?sig=its-own"])


def test_headers_do_not_come_back_by_way_of_another_server(stack: ExitStack, tmp_path: Path) -> None:
    place: list[str] = []
    there, _ = stack.enter_context(web(lambda path: (302, f"{place[0]}/end")))
    here, heard = stack.enter_context(web(lambda path: (200, "") if path == "/end" else (302, f"{there}/x")))
    place.append(here)
    with Cache(tmp_path, options={"headers": GIVEN}) as cache:
        assert cache.read(f"{here}/a") == b"ok"
    assert "authorization" not in heard["/end"]


def test_a_refusal_after_a_redirect_says_where_and_nothing_secret(stack: ExitStack, tmp_path: Path) -> None:
    there, _ = stack.enter_context(web(lambda path: (403, "")))
    here, heard = stack.enter_context(web(lambda path: (302, f"{there}/b?X-Amz-Signature=hush")))
    url = f"{here}/a?token=hush".replace("//", "//user:hush@")
    with Cache(tmp_path) as cache, pytest.raises(NotServedError) as caught:
        cache.read(url)
    assert heard["/a?token=hush"]["authorization"] == "Basic dXNlcjpodXNo"
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
def test_which_servers_are_the_same(one: str, other: str, may: bool) -> None:
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


@pytest.mark.parametrize("text", ["is it there?", "the server answered 404 Not Found", "s3://bucket/key: no such key"])
def test_other_messages_stay_as_they_are(text: str) -> None:
    assert redacted(text) == text


def test_a_url_that_cannot_be_asked_for_shows_no_secret(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:1/a b?sig=hush", "http://user:hush@127.0.0.1:port/a"):
        with Cache(tmp_path, retries=0) as cache, pytest.raises((NotServedError, CacheError)) as caught:
            cache.read(url)
        assert "hush" not in str(caught.value)


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
def test_what_a_stranger_links_into_a_cache_is_never_written_through(
    stack: ExitStack, tmp_path: Path, ending: str
) -> None:
    here, _ = stack.enter_context(web(lambda path: (200, "")))
    url, theirs = f"{here}/a", tmp_path / "theirs"
    theirs.write_text("precious")
    with Cache(tmp_path / "cache", retries=0) as cache:
        directory = cache._directory
        place = {"lock": directory.lock(url).path, "part": directory.part(url), "json": directory._meta(url)}[ending]
        place.symlink_to(theirs)
        with contextlib.suppress(CacheError):  # a lock is refused, leftovers are removed first
            cache.read(url)
    assert theirs.read_text() == "precious"
