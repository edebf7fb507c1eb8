# SPDX-License-Identifier: Apache-2.0
"""The interface of storage backends: one request gives the size, the checksum and the bytes of a file.

A backend does not retry; :mod:`paceline_plugins.data.cache.download` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from paceline_plugins.data.cache.checksums import Checksum

CHUNK_BYTES = 256 << 10
"""Read, hashed and written at a time: small enough to stay in a processor's cache between the three."""
BLOCK_BYTES = 2 << 20
"""Asked for at a time where each block is a request of its own."""


class Unavailable(Exception):
    """A failure that another try might cure; it never leaves this package."""


@dataclass(frozen=True)
class RemoteFile:
    """An open remote file: its size in bytes and its checksum (None: unknown), and its bytes."""

    size: int | None
    checksum: Checksum | None
    chunks: Iterator[bytes]


class Backend(Protocol):
    """One object store, web server or file system."""

    def begin(self, url: str) -> AbstractContextManager[RemoteFile]:
        """Open a file to be read once, from its start.

        Raises:
            NotServedError: there is no such file, or it may not be read.
            Unavailable: another try might succeed; also while the chunks are read.
        """
