# SPDX-License-Identifier: Apache-2.0
"""What the state machine has to say: to workers, and to the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.flow.control.worker_record import Answer


class Outbox:
    """Answers in their order, until the server takes them."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def take(self) -> list[Answer]:
        """What is to be said, in this order; then it counts as said."""
        taken, self._answers = self._answers, []
        return taken

    def add(self, answers: Iterable[Answer]) -> None:
        """Say these after what is to be said already."""
        self._answers.extend(answers)

    def say(self, worker: int, kind: str, serial: int = 0, numbers: Iterable[int] = (), note: Any = None) -> None:
        """Say something to a worker."""
        self._answers.append(Answer(worker, kind, serial, tuple(numbers), note))

    def note(self, event: str, **about: Any) -> None:
        """Something for the log."""
        self._answers.append(Answer(None, event, note=about))
