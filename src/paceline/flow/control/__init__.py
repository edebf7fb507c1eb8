# SPDX-License-Identifier: Apache-2.0
"""The control plane of elastic runs: who is a member, which exchanges are committed, and who has which data.

:class:`Control` lives in the launcher, a :class:`Member` in every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.flow.control.client import Member
    from paceline.flow.control.errors import EXPELLED, GivenUpError, OverError, RefusedError
    from paceline.flow.control.messages import About, Generation, Place, Terms, Verdict
    from paceline.flow.control.server import Control
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "EXPELLED": "errors",
            "About": "messages",
            "Control": "server",
            "Generation": "messages",
            "GivenUpError": "errors",
            "Member": "client",
            "OverError": "errors",
            "Place": "messages",
            "RefusedError": "errors",
            "Terms": "messages",
            "Verdict": "messages",
        },
    )

__all__ = [
    "EXPELLED",
    "About",
    "Control",
    "Generation",
    "GivenUpError",
    "Member",
    "OverError",
    "Place",
    "RefusedError",
    "Terms",
    "Verdict",
]
