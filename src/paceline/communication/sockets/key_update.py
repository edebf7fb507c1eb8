# SPDX-License-Identifier: Apache-2.0
"""Renews the key with which a TLS 1.3 connection encrypts what it sends (KeyUpdate, RFC 8446, section 4.6.3).

OpenSSL leaves that to the program, and Python's `ssl` has no call for it. So OpenSSL's own function is called in the
library that `ssl` has loaded. Its argument is a field of CPython's socket object: it is used only if the fields beside
it are the ones that they should be, and the connection is refused a new key otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import ssl
from typing import Any

_NOT_REQUESTED = 0  # the other end keeps its own key
_WORD = ctypes.sizeof(ctypes.c_void_p)
_FIELDS = object.__basicsize__
"""Bytes before the fields of `_ssl._SSLSocket`: a weak reference to the Python socket, OpenSSL's SSL, the context."""


def renew(sock: ssl.SSLSocket) -> bool:
    """Send what follows with a new key; False if this interpreter or the connection's state does not allow it.

    The caller sees to it that no other thread uses the connection meanwhile.
    """
    function, connection = _function(), sock._sslobj  # type: ignore[attr-defined]
    if function is None or connection is None or sock.version() != "TLSv1.3":
        return False
    context = ctypes.c_void_p.from_address(id(connection) + _FIELDS + 2 * _WORD).value
    if context != id(connection.context):  # another layout
        return False
    pointer = ctypes.c_void_p.from_address(id(connection) + _FIELDS + _WORD).value
    return pointer is not None and function(pointer, _NOT_REQUESTED) == 1


@functools.cache
def _function() -> Any:
    """OpenSSL's SSL_key_update; None where `ssl` does not show it."""
    if platform.python_implementation() != "CPython":
        return None
    try:
        import _ssl

        update = ctypes.CDLL(_ssl.__file__).SSL_key_update  # finds the symbols of the libraries that it was linked to
    except (ImportError, AttributeError, OSError):
        return None
    update.argtypes, update.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int
    return update
