# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with remote files.

::

    PacelineError
    ├── CacheError (RuntimeError)         the directory is full, gone or cannot be written; a source is lost
    │   └── CorruptFileError              what came is not what the source or the caller says it must be
    └── NotServedError (ValueError)       there is no such file, or this program may not have it

`Unavailable` never leaves the package: it says that another try may succeed.
"""

from __future__ import annotations

from paceline.errors import PacelineError


class CacheError(PacelineError, RuntimeError):
    """The cache cannot bring a file: no room, no directory, or a source that does not answer."""


class CorruptFileError(CacheError):
    """Every download of a file had the wrong size or the wrong checksum."""


class NotServedError(PacelineError, ValueError):
    """The source will not give this file, however often it is asked."""


class Unavailable(Exception):
    """A try that failed and is worth another."""
