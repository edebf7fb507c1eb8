# SPDX-License-Identifier: Apache-2.0
"""One bucket through obstore, and the program that reads it for another process.

The module needs the standard library and obstore alone, and the program is run by its path: so it starts in some 50 ms,
where importing paceline takes seconds. (Until its first line has come it finds modules in its own folder first, so
none there may bear the name of one of the standard library.) :mod:`paceline.data.cache.fetch_subprocess` is the other
end. All messages are single lines of JSON, over stdin and stdout:

    first line       {"path": where this process finds its modules}
    request          {"url", "options", "timeout_s"}
    answer           {"size", "etag", "sha256"}, then for every chunk {"bytes": n} and n bytes, then {"end": true}
    or, at any time  {"error": "missing" | "refused" | "wrong" | "unavailable", "text"}

The program ends when its input ends, wherever it stands. What a request says never stands on a command line.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 2 << 20
"""How much is asked for and passed on at a time."""


class Failure(Exception):
    """A try that failed: `kind` is "missing", "refused", "wrong" or "unavailable" (worth another try)."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Answer:
    """An object that is open: bytes, ETag and `sha256` of its metadata (None: there is none)."""

    def __init__(self, obstore: Any, answer: Any) -> None:
        self._obstore, self._answer = obstore, answer
        self.size = int(answer.meta["size"])
        self.etag: str | None = answer.meta["e_tag"]
        sha256 = answer.attributes.get("sha256")
        self.sha256 = sha256 if isinstance(sha256, str) else None

    def chunks(self) -> Iterator[Any]:
        """Its bytes, as buffers; raises :class:`Failure`."""
        try:
            yield from self._answer.stream(min_chunk_size=CHUNK_BYTES)
        except Exception as error:
            raise _failure(self._obstore, error) from error


class Bucket:
    """One bucket.

    Args:
        url: any url of the bucket.
        options: obstore's settings of the store.
        timeout_s: of one request, and of connecting.

    Raises:
        ImportError: there is no obstore.
        Failure: the options make no sense.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_s: float) -> None:
        import obstore
        import obstore.store

        self._obstore: Any = obstore
        parts = urlsplit(url)
        client: dict[str, Any] = {name: timedelta(seconds=timeout_s) for name in ("timeout", "connect_timeout")}
        if str(options.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = True
        settings = {key: value for key, value in options.items() if key != "client_options"}
        try:
            self._store = self._obstore.store.from_url(
                f"{parts.scheme}://{parts.netloc}",
                client_options={**client, **options.get("client_options", {})},
                retry_config={"max_retries": 0},  # retries are counted and waited for by the caller
                **settings,
            )
        except Exception as error:
            raise Failure("wrong", f"the options of this store: {_first_line(error)}") from error

    def get(self, url: str) -> Answer:
        """Open an object; raises :class:`Failure`."""
        key = url.partition("://")[2].partition("/")[2]  # as it is: %, ? and # are letters like others in a key
        try:
            return Answer(self._obstore, self._obstore.get(self._store, key))
        except Exception as error:
            raise _failure(self._obstore, error) from error


def _failure(obstore: Any, error: Exception) -> Failure:
    known = obstore.exceptions
    if isinstance(error, (FileNotFoundError, known.NotFoundError)):
        kind = "missing"
    elif isinstance(error, (PermissionError, known.PermissionDeniedError, known.UnauthenticatedError)):
        kind = "refused"
    elif isinstance(error, (known.InvalidPathError, known.NotSupportedError, known.UnknownConfigurationKeyError)):
        kind = "wrong"
    else:
        kind = "unavailable"
    return Failure(kind, _first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:300]


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, whose end is told by the input
    sys.path[:] = json.loads(sys.stdin.buffer.readline())["path"]
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    buckets: dict[str, Bucket] = {}
    while True:
        try:
            _answer(json.loads(requests.get()), buckets)
        except Failure as failure:
            _say({"error": failure.kind, "text": str(failure)})
        except BrokenPipeError:
            os._exit(0)
        except Exception as error:  # whatever it is, the one who asks should hear it
            _say({"error": "unavailable", "text": f"{type(error).__name__}: {_first_line(error)}"})


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    """Hear the end of the input also while an answer is under way: then there is nobody any more to answer."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def _answer(request: dict[str, Any], buckets: dict[str, Bucket]) -> None:
    url = request["url"]
    place = json.dumps([urlsplit(url)[:2], request["options"], request["timeout_s"]])
    if place not in buckets:
        buckets[place] = Bucket(url, request["options"], request["timeout_s"])
    answer = buckets[place].get(url)
    _say({"size": answer.size, "etag": answer.etag, "sha256": answer.sha256})
    for chunk in answer.chunks():
        view = memoryview(chunk)
        _say({"bytes": view.nbytes})
        _write(view)
    _say({"end": True})


def _say(message: Mapping[str, Any]) -> None:
    _write(memoryview(json.dumps(message).encode() + b"\n"))


def _write(view: memoryview) -> None:
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
