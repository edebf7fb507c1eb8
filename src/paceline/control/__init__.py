# SPDX-License-Identifier: Apache-2.0
"""The control plane of elastic runs: who is a member, which exchanges are committed, and who has which data.

:class:`Control` lives in the launcher, a :class:`Member` in every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.control.client import Member
    from paceline.control.errors import EXPELLED, GivenUpError, OverError, RefusedError
    from paceline.control.server import Control
    from paceline.control.terms import About, Generation, Place, Terms, Verdict
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "EXPELLED": "errors",
            "About": "terms",
            "Control": "server",
            "Generation": "terms",
            "GivenUpError": "errors",
            "Member": "client",
            "OverError": "errors",
            "Place": "terms",
            "RefusedError": "errors",
            "Terms": "terms",
            "Verdict": "terms",
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
