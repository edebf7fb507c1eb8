# SPDX-License-Identifier: Apache-2.0
"""The control plane of elastic runs: membership, commits of exchanges, and leases of data.

:class:`ControlServer` lives in the launcher, a :class:`ControlClient` in every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.flow.control.client import ControlClient
    from paceline.flow.control.messages import About, CommitOutcome, Generation, Terms, WorkerAddress
    from paceline.flow.control.server import ControlServer
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "About": "messages",
            "ControlServer": "server",
            "Generation": "messages",
            "ControlClient": "client",
            "WorkerAddress": "messages",
            "Terms": "messages",
            "CommitOutcome": "messages",
        },
    )

__all__ = [
    "About",
    "CommitOutcome",
    "ControlClient",
    "ControlServer",
    "Generation",
    "Terms",
    "WorkerAddress",
]
