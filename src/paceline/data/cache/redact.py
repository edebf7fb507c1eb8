# SPDX-License-Identifier: Apache-2.0
"""What may not stand in a message or a log: user names and passwords before a host, and the query of a signed url."""

from __future__ import annotations

import re

USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)[^/\s?#'\"]*@(?=[^/\s])")
QUERY = re.compile(r"(?<=[\w/%.~=:-])\?[^\s'\"<>)\]]*=[^'\"<>)\]\n]*")
NAMED = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|[a-z_-]*(?:signature|credential|password|secret|token|"
    r"(?:api|access|account|shared|private)[_-]?key)|sig)(['\"]?\s*[:=]\s*['\"]?)(?:(?:bearer|basic)\s+)?[^\s'\"&,;)\]}]+"
)


def redacted(text: object) -> str:
    """The words of a client library's error without what may be a secret in them."""
    shown = USER.sub(r"\1", str(text))
    return NAMED.sub(r"\1\2...", QUERY.sub("?...", shown))
