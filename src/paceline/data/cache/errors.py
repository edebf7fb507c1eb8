# SPDX-License-Identifier: Apache-2.0
"""What the parts of the cache tell each other when a try has failed."""

from __future__ import annotations


class Unavailable(Exception):
    """A try that failed and is worth another; it never leaves the package."""
