# SPDX-License-Identifier: Apache-2.0
"""What is wrong with data: one class, one line a message."""

from __future__ import annotations

from paceline.errors import PacelineError


class DataError(PacelineError, ValueError):
    """A file of data is missing, damaged or not of a kind that can be read; the message names file and place."""
