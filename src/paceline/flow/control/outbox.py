# SPDX-License-Identifier: Apache-2.0
"""Messages of the state machine to workers and to the event log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.flow.control.worker_record import ControlMessage


class ControlOutbox:
    """Messages in order, until the server takes them."""

    def __init__(self) -> None:
        self._answers: list[ControlMessage] = []

    def take(self) -> list[ControlMessage]:
        """Remove and return all messages, in order."""
        taken, self._answers = self._answers, []
        return taken

    def add(self, answers: Iterable[ControlMessage]) -> None:
        """Append these messages."""
        self._answers.extend(answers)

    def send(self, worker: int, kind: str, serial: int = 0, numbers: Iterable[int] = (), note: Any = None) -> None:
        """Append a message to a worker."""
        self._answers.append(ControlMessage(worker, kind, serial, tuple(numbers), note))

    def log(self, event: str, **about: Any) -> None:
        """Append an event for the log."""
        self._answers.append(ControlMessage(None, event, note=about))
