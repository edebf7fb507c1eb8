# SPDX-License-Identifier: Apache-2.0
"""Files over plain HTTP, through the standard library, which shows every checksum header."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from paceline.checkpoint.urls import redacted, shown, source_of
from paceline.errors import NotServedError
from paceline_plugins.data.cache.backend import CHUNK_BYTES, RemoteFile, Unavailable
from paceline_plugins.data.cache.checksums import Checksum, best, from_base64, md5_of_etag, of_metadata
from paceline_plugins.data.cache.plain_body import has_plain_body, plain_body

TRANSIENT = (408, 425, 429)
"""Codes below 500 that are retried."""
OWN_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "paceline"}
"""Sent to every server."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and sends the user's headers to no other server.

    Attributes:
        stripped_at: the first server that did not get them, for messages.
    """

    stripped_at = ""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The request to the new server; None where it is not followed."""
        request = super().redirect_request(req, fp, code, msg, headers, _without_user(newurl)[0])
        if request is not None and not _may_share_headers(req.full_url, request.full_url):
            given = {name for name in request.headers if name.lower() not in map(str.lower, OWN_HEADERS)}
            for name in given:
                request.remove_header(name)
            self.stripped_at = self.stripped_at or (shown(request.full_url) if given else "")
        return request


def _may_share_headers(one: str, other: str) -> bool:
    """Whether `other` is the server of `one`, or the same behind TLS at the usual port."""
    origins = (_origin(one), _origin(other))
    upgrade = origins[0][0] == "http" and origins[0][2] == 80 and origins[1] == ("https", origins[0][1], 443)
    return origins[0] == origins[1] or upgrade


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    return parts.scheme, (parts.hostname or "").rstrip("."), port


def _without_user(url: str) -> tuple[str, dict[str, str]]:
    """A URL without its user and password, and the header that carries them instead."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    credentials = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {credentials}"}


class HttpBackend:
    """Web servers; `headers` go with every request, but not to another host, port or scheme after a redirect.

    With `s3`, all are known to speak S3's protocol, also those whose answers do not show it.
    """

    def __init__(self, headers: Mapping[str, str], timeout_s: float, *, s3: bool = False) -> None:
        self._headers = {**OWN_HEADERS, **headers}
        self._timeout_s, self._s3 = timeout_s, s3

    @contextmanager
    def begin(self, url: str) -> Iterator[RemoteFile]:
        """See :class:`paceline_plugins.data.cache.backend.Backend`."""
        redirects = _Redirects()
        try:
            address, user = _without_user(url)
            request = urllib.request.Request(address, headers={**user, **self._headers})
            answer = urllib.request.build_opener(redirects).open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            code, reason = error.code, redacted(error.reason)
            error.close()
            if code < 500 and code not in TRANSIENT:
                raise NotServedError(_refusal(url, code, reason, redirects.stripped_at)) from None
            raise Unavailable(f"the server answered {code} {reason}") from None
        except (ValueError, http.client.InvalidURL) as error:
            raise NotServedError(
                f"{shown(url)} is no url that can be asked for: {redacted(error)}; write blanks as %20"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(_reason(error)) from None
        with closing(answer):
            yield RemoteFile(_size(answer.headers), checksum_of(answer.headers, self._s3), self._chunks(answer))

    def _chunks(self, answer: Any) -> Iterator[bytes]:
        try:
            if has_plain_body(answer):
                yield from plain_body(answer, self._timeout_s)
            else:
                yield from iter(lambda: answer.read(CHUNK_BYTES), b"")
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(_reason(error)) from None


def _refusal(url: str, code: int, reason: str, stripped_at: str) -> str:
    if code in (401, 403) and stripped_at:
        cure = (
            f"it was redirected to {stripped_at}, where the headers given for {source_of(url)} are not sent; give the "
            "url of the file itself, with the headers that its server wants"
        )
    elif code in (401, 403):
        cure = "check the rights of this machine's credentials (options={'headers': {'Authorization': ...}})"
    else:
        cure = "check the url, or take it off the list"
    return f"{shown(url)}: the server answered {code} {reason}, and will not give this file; {cure}"


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, (socket.timeout, TimeoutError)):
        return "no answer in time"
    return f"{type(error).__name__}: {redacted(reason)}"


def _size(headers: Mapping[str, str]) -> int | None:
    text = headers.get("Content-Length")
    encoded = headers.get("Content-Encoding", "identity") != "identity"
    return int(text) if text is not None and text.isdigit() and not encoded else None


def checksum_of(headers: Mapping[str, str], s3: bool = False) -> Checksum | None:
    """The checksum among an answer's headers that costs least; an ETag counts only where it is S3's and an MD5."""
    s3 = s3 or headers.get("x-amz-request-id") is not None
    if headers.get("Content-Encoding", "identity") != "identity":
        return None
    google = dict(re.findall(r"(\w+)=([A-Za-z0-9+/=]+)", headers.get("x-goog-hash", "")))
    digest = re.search(r"sha-256=:?([A-Za-z0-9+/=]+?):?(?:,|$)", headers.get("Repr-Digest", headers.get("Digest", "")))
    return best(
        [
            md5_of_etag(headers.get("ETag")) if s3 and _etag_is_md5(headers) else None,
            *(from_base64(name, google.get(name)) for name in ("md5", "crc32c")),
            from_base64("md5", headers.get("Content-MD5")),
            from_base64("sha256", digest.group(1) if digest else None),
            *(from_base64(name, headers.get(f"x-amz-checksum-{name}")) for name in ("sha256", "crc32", "crc32c")),
            *of_metadata(lambda name: headers.get(f"x-amz-meta-{name}")),
        ]
    )


def _etag_is_md5(headers: Mapping[str, str]) -> bool:
    """S3's ETag is the MD5 unless the object is encrypted with a key of KMS or of the customer."""
    kms = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    customer = headers.get("x-amz-server-side-encryption-customer-algorithm") is not None
    return not kms and not customer
