# SPDX-License-Identifier: Apache-2.0
"""Whom a training tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Show(Protocol):
    """What is told how far a training is; on worker 0 only."""

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """So much of it is done; it may be called often, and from another thread."""

    def say(self, text: str) -> None:
        """Something is over."""


class Silent:
    """Shows nothing."""

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""
