# SPDX-License-Identifier: Apache-2.0
"""Messages of zero lines to the user."""

from __future__ import annotations

import sys

from paceline_plugins.zero.rank_discovery import ZeroWorker


class Reporter:
    """Prints each message once, on rank 0.

    Args:
        worker: this worker.
    """

    def __init__(self, worker: ZeroWorker) -> None:
        self._worker = worker
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """One line on stderr, so that the program's output stays unchanged."""
        if self._worker.rank == 0 and text not in self._said:
            self._said.add(text)
            print(f"paceline: {text}", file=sys.stderr, flush=True)

    def once(self, about: str, text: str) -> None:
        """As `say`, once for each `about`, for any text."""
        if about not in self._said:
            self._said.add(about)
            self.say(text)
