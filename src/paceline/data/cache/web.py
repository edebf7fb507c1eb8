# SPDX-License-Identifier: Apache-2.0
"""Files over plain HTTP, with nothing but the standard library, so that every checksum header can be read."""

from __future__ import annotations

import http.client
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.data.cache.errors import Unavailable
from paceline.data.cache.source import (
    CHUNK_BYTES,
    Checksum,
    Remote,
    md5_of_base64,
    md5_of_etag,
    sha256_of_base64,
    sha256_of_hex,
    shown,
)
from paceline.errors import NotServedError

PASSING = (408, 425, 429)
"""Answers of the 400s that another try may turn into a file."""


class HttpSource:
    """A web server.

    Args:
        headers: sent with every request, such as `Authorization`.
        timeout_s: of connecting, and of each wait for more bytes.
    """

    def __init__(self, headers: Mapping[str, str], timeout_s: float) -> None:
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "paceline", **headers}
        self._timeout_s = timeout_s

    @contextmanager
    def begin(self, url: str) -> Iterator[Remote]:
        """See :class:`paceline.data.cache.source.Source`."""
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url, headers=self._headers), timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            code, reason = error.code, error.reason
            error.close()
            if code < 500 and code not in PASSING:
                raise NotServedError(_refusal(url, code, reason)) from None
            raise Unavailable(f"the server answered {code} {reason}") from None
        except (ValueError, http.client.InvalidURL) as error:
            raise NotServedError(
                f"{shown(url)} is no url that can be asked for: {error}; write blanks as %20"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(_plain(error)) from error
        with answer:
            yield Remote(_size(answer.headers), checksum_of(answer.headers), _chunks(answer))


def _refusal(url: str, code: int, reason: str) -> str:
    if code in (401, 403):
        cure = "check the rights of this machine's credentials (options={'headers': {'Authorization': ...}})"
    else:
        cure = "check the url, or take it off the list"
    return f"{shown(url)}: the server answered {code} {reason}, and will not give this file; {cure}"


def _plain(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, (socket.timeout, TimeoutError)):
        return "no answer in time"
    return f"{type(error).__name__}: {reason}"


def _size(headers: Mapping[str, str]) -> int | None:
    text = headers.get("Content-Length")
    encoded = headers.get("Content-Encoding", "identity") != "identity"
    return int(text) if text is not None and text.isdigit() and not encoded else None


def _chunks(answer: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk = answer.read(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(_plain(error)) from error
        if not chunk:
            return
        yield chunk


def checksum_of(headers: Mapping[str, str]) -> Checksum | None:
    """The best checksum among an answer's headers; an ETag counts only where it comes from S3 and is an MD5."""
    if headers.get("Content-Encoding", "identity") != "identity":
        return None
    google = dict(re.findall(r"(\w+)=([A-Za-z0-9+/=]+)", headers.get("x-goog-hash", "")))
    digest = re.search(r"sha-256=:?([A-Za-z0-9+/=]+?):?(?:,|$)", headers.get("Repr-Digest", headers.get("Digest", "")))
    return (
        sha256_of_hex(headers.get("x-amz-meta-sha256"))
        or sha256_of_base64(headers.get("x-amz-checksum-sha256"))
        or sha256_of_base64(digest.group(1) if digest else None)
        or md5_of_base64(headers.get("Content-MD5"))
        or md5_of_base64(google.get("md5"))
        or (md5_of_etag(headers.get("ETag")) if _etag_is_md5(headers) else None)
    )


def _etag_is_md5(headers: Mapping[str, str]) -> bool:
    """S3's ETag is the MD5 unless the bucket is encrypted with a key of KMS or of the customer."""
    kms = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    customer = headers.get("x-amz-server-side-encryption-customer-algorithm") is not None
    return headers.get("x-amz-request-id") is not None and not kms and not customer
