# SPDX-License-Identifier: Apache-2.0
"""Progress of a training."""

from __future__ import annotations

from typing import Protocol


class Show(Protocol):
    """Displays the progress of a training; on worker 0 only."""

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """Progress; may be called often, and from another thread."""

    def say(self, text: str) -> None:
        """A message."""


class Silent:
    """Displays nothing."""

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""
