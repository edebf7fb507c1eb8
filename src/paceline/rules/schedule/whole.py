# SPDX-License-Identifier: Apache-2.0
"""Whole numbers among the numbers of a schedule."""

from __future__ import annotations


def is_whole(value: object) -> bool:
    """Whether it is a whole number, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
