# SPDX-License-Identifier: Apache-2.0
"""The control plane of elastic runs: membership, commits of exchanges, and leases of data.

:class:`Control` lives in the launcher, a :class:`Member` in every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.flow.control.client import Member
    from paceline.flow.control.messages import About, Generation, Place, Terms, Verdict
    from paceline.flow.control.server import Control
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "About": "messages",
            "Control": "server",
            "Generation": "messages",
            "Member": "client",
            "Place": "messages",
            "Terms": "messages",
            "Verdict": "messages",
        },
    )

__all__ = [
    "About",
    "Control",
    "Generation",
    "Member",
    "Place",
    "Terms",
    "Verdict",
]
